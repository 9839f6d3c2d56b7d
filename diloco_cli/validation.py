"""pydantic's errors in our words: what is wrong with a value, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def nearest(word: str, known: Sequence[str], label: str) -> str:
    """Guesses what was meant, or lists what there is."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean `{close[0]}`?" if close else f"{label}: {', '.join(known) or 'none'}"


def in_words(detail: ErrorDetails, known: Sequence[str] = ()) -> tuple[str, str | None]:
    """Says what pydantic found, to be read after the key, and a hint; `known` are the keys."""
    kind, got = detail["type"], f"got {_shown(detail.get('input'))}"
    limits = detail.get("ctx", {})
    if kind == "missing":
        return "is missing", "Add it."
    if kind == "extra_forbidden":
        return "no such key", nearest(str(detail["loc"][-1]), known, "Known keys")
    if kind == "literal_error":
        return f"must be {limits['expected']}; {got}", None
    if kind == "string_pattern_mismatch":
        wanted = "small letters, digits, - and _, at most 64, first and last a letter or digit"
        return f"needs {wanted}; {got}", None
    if kind == "too_short":
        return f"needs at least {limits['min_length']}; {got}", None
    for word, sign in _LIMITS.items():
        if kind == word:
            return f"must be {sign} {_written(limits[next(iter(limits))])}; {got}", None
    for start, wanted in _WANTED.items():
        if kind.startswith(start):
            return f"needs {wanted}; {got}", _example(wanted, detail)
    message = detail["msg"].removeprefix("Value error, ")
    return (f"{message}; {got}" if detail["loc"] else message), None


_LIMITS = {
    "greater_than_equal": "at least",
    "greater_than": "more than",
    "less_than_equal": "at most",
    "less_than": "less than",
}
_WANTED = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_number": "a finite number",
    "string_": "text",
    "bool_": "true or false",
    "dict_": "a mapping (key: value)",
    "model_": "a mapping (key: value)",
    "dataclass_": "a mapping (key: value)",
    "tuple_": "a list",
    "list_": "a list",
}


def _written(limit: float) -> str:
    return str(int(limit)) if float(limit).is_integer() else str(limit)


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


_FIRST = {"budget": "tokens", "regions": "name"}
"""The one key that a mapping of these cannot do without; of others it is `kind`."""
_PLACES = ("listen", "health")


def _example(wanted: str, detail: ErrorDetails) -> str | None:
    """What to write instead, where a single value was given."""
    value, key = detail.get("input"), detail["loc"][-1] if detail["loc"] else ""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if wanted == "text":
        if key in _PLACES and isinstance(value, int):
            return f"It is HOST:PORT, as in 127.0.0.1:{value}."
        return "Put it in quotes." if not isinstance(value, str) else None
    names = [each for each in detail["loc"] if isinstance(each, str)]
    if wanted == "a list":
        return f"Write [{value}]."
    if wanted == _WANTED["dict_"]:
        first = _FIRST.get(names[-1] if names else "", "kind")
        file = first == "kind" and isinstance(value, str) and "." in value
        return f"Write {{kind: hf, file: {value}}}." if file else f"Write {{{first}: {value}}}."
    return None
