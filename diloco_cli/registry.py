"""Named choices: `kind: int8` in the spec becomes a frozen dataclass.

The chosen thing is its own configuration: its fields are its options. A new kind is
one class and one decorator, whether it is ours or a plugin's.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from diloco_cli.errors import RegistryError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


@cache
def _reader(choice: type[Any]) -> TypeAdapter[Any]:
    """Checks a choice's options; making it takes milliseconds, and frames ask every time."""
    return TypeAdapter(choice)


class Registry(Generic[T]):
    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._choices: dict[str, type[T]] = {}

    def register(self, kind: str) -> Callable[[C], C]:
        def add(choice: C) -> C:
            if kind in self._choices:
                raise ValueError(f"{self.noun} {kind!r} is taken by {self._choices[kind]!r}")
            self._choices[kind] = cast("type[T]", choice)
            return choice

        return add

    def kinds(self) -> list[str]:
        return sorted(self._choices)

    def choice(self, kind: str) -> type[T]:
        return self._choices[kind]

    def build(self, asked: Mapping[str, Any]) -> T:
        """Makes the chosen thing, or says which option is wrong and what was meant."""
        built, errors = self.inspect(asked)
        if built is None:
            raise errors[0]
        return built

    def inspect(self, asked: Mapping[str, Any]) -> tuple[T | None, list[RegistryError]]:
        """Makes the chosen thing, or lists everything that is wrong with what was asked."""
        options = dict(asked)
        kind = options.pop("kind", None)
        if not isinstance(kind, str) or kind not in self._choices:
            return None, [self._unknown(kind)]
        choice = self._choices[kind]
        known = [field.name for field in dataclasses.fields(cast(Any, choice)) if field.init]
        errors = [
            RegistryError(
                f"The {self.noun} {kind!r} has no option {key!r}.",
                hint=nearest(key, known, "Its options are"),
                key=key,
            )
            for key in options
            if key not in known
        ]
        fitting = {key: value for key, value in options.items() if key in known}
        try:
            built = _reader(choice).validate_python(fitting)
            return (None, errors) if errors else (built, [])
        except RegistryError as error:  # An option is itself a choice, and a wrong one.
            return None, [*errors, error]
        except ValidationError as error:
            return None, errors + [self._unfit(kind, detail) for detail in error.errors()]

    def _unknown(self, kind: object) -> RegistryError:
        if kind is None:
            said = f"The {self.noun} needs a `kind`."
            return RegistryError(said, hint=f"Known kinds: {', '.join(self.kinds())}")
        said = f"There is no {self.noun} called {kind!r}."
        return RegistryError(said, hint=nearest(str(kind), self.kinds(), "Known kinds"))

    def _unfit(self, kind: str, detail: ErrorDetails) -> RegistryError:
        message, hint = in_words(detail)
        if not detail["loc"]:
            return RegistryError(f"The {self.noun} {kind!r}: {message}", hint=hint)
        key = ".".join(str(step) for step in detail["loc"])
        said = f"The {self.noun} {kind!r}: {key} {message}"
        return RegistryError(said, hint=hint, key=key)


def nearest(asked: str, known: Sequence[str], label: str) -> str:
    """Guesses what was meant, or lists what there is."""
    close = difflib.get_close_matches(asked, known, n=1)
    return f"Did you mean `{close[0]}`?" if close else f"{label}: {', '.join(known) or 'none'}"


def in_words(detail: ErrorDetails, known: Sequence[str] = ()) -> tuple[str, str | None]:
    """Says what pydantic found in plain words, to be read after the key; and a hint."""
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
            return f"must be {sign} {limits[next(iter(limits))]}; {got}", None
    for start, wanted in _WANTED.items():
        if kind.startswith(start):
            return f"needs {wanted}; {got}", _quoting(wanted, detail.get("input"))
    said = detail["msg"].removeprefix("Value error, ")
    return (f"{said}; {got}" if detail["loc"] else said), None


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


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _quoting(wanted: str, value: object) -> str | None:
    is_scalar = isinstance(value, (int, float))
    return "Put it in quotes." if wanted == "text" and is_scalar else None
