"""Named choices: `kind: int8` in the spec becomes a frozen dataclass.

The chosen thing is its own configuration: its fields are its options. A new kind is
one class and one decorator, whether it is ours or a plugin's.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from diloco_cli.errors import RegistryError

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._choices: dict[str, type[T]] = {}

    def register(self, kind: str) -> Callable[[type[T]], type[T]]:
        def add(choice: type[T]) -> type[T]:
            if kind in self._choices:
                raise ValueError(f"{self.noun} {kind!r} is taken by {self._choices[kind]!r}")
            self._choices[kind] = choice
            return choice

        return add

    def kinds(self) -> list[str]:
        return sorted(self._choices)

    def choice(self, kind: str) -> type[T]:
        return self._choices[kind]

    def build(self, asked: Mapping[str, Any]) -> T:
        """Makes the chosen thing, or says which option is wrong and what was meant."""
        options = dict(asked)
        kind = options.pop("kind", None)
        if kind not in self._choices:
            said = (
                f"There is no {self.noun} called {kind!r}."
                if kind
                else f"The {self.noun} needs a `kind`."
            )
            raise RegistryError(said, hint=_nearest(str(kind), self.kinds(), "Known kinds"))
        choice = self._choices[kind]
        known = [field.name for field in dataclasses.fields(cast(Any, choice)) if field.init]
        for key in options:
            if key not in known:
                raise RegistryError(
                    f"The {self.noun} {kind!r} has no option {key!r}.",
                    hint=_nearest(key, known, "Its options are"),
                    key=key,
                )
        try:
            return TypeAdapter(choice).validate_python(options)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else "kind"
            said = first["msg"].removeprefix("Value error, ")
            value = (
                f" (got {first['input']!r})" if first["loc"] and first["type"] != "missing" else ""
            )
            raise RegistryError(f"{self.noun} {kind!r}: {key}: {said}{value}", key=key) from None


def _nearest(asked: str, known: list[str], label: str) -> str:
    close = difflib.get_close_matches(asked, known, n=1)
    return f"Did you mean `{close[0]}`?" if close else f"{label}: {', '.join(known) or 'none'}"
