"""Named choices: `kind: int8` in the spec becomes a frozen dataclass.

The chosen thing is its own configuration: its fields are its options. A new kind is
one class and one decorator, whether it is ours or a plugin's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from diloco_cli.errors import RegistryError
from diloco_cli.validation import in_words, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


@cache
def _reader(choice: type[Any]) -> TypeAdapter[Any]:
    """Checks a choice's options; making it takes milliseconds, and frames ask every time."""
    return TypeAdapter(choice)


@dataclasses.dataclass(frozen=True, slots=True)
class Advised:
    """In the type of an option: what to say to whoever gives it another kind of value."""

    words: str


class Registry(Generic[T]):
    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._choices: dict[str, type[T]] = {}

    def register(self, kind: str) -> Callable[[C], C]:
        def add(choice: C) -> C:
            if kind in self._choices:
                raise ValueError(f"{self.noun} {kind!r} is taken by {self._choices[kind]!r}")
            self._choices[kind] = cast("type[T]", choice)
            # Read by pydantic: no option of any kind is nan or without an end.
            if "__pydantic_config__" not in vars(choice):
                cast(Any, choice).__pydantic_config__ = ConfigDict(allow_inf_nan=False)
            return choice

        return add

    def kinds(self) -> list[str]:
        return sorted(self._choices)

    def choice(self, kind: str) -> type[T]:
        return self._choices[kind]

    def build(self, choice: Mapping[str, Any]) -> T:
        """Makes the chosen thing, or says which option is wrong and what was meant."""
        built, errors = self.inspect(choice)
        if built is None:
            raise errors[0]
        return built

    def inspect(self, choice: Mapping[str, Any]) -> tuple[T | None, list[RegistryError]]:
        """Makes the chosen thing, or lists everything that is wrong with what was asked."""
        options = dict(choice)
        kind = options.pop("kind", None)
        if not isinstance(kind, str) or kind not in self._choices:
            return None, [self._unknown(kind)]
        factory = self._choices[kind]
        names = [field.name for field in dataclasses.fields(cast(Any, factory)) if field.init]
        errors = [
            RegistryError(
                f"The {self.noun} {kind!r} has no option {key!r}.",
                hint=nearest(key, names, "Its options are"),
                key=key,
            )
            for key in options
            if key not in names
        ]
        fitting = {key: value for key, value in options.items() if key in names}
        try:
            built = _reader(factory).validate_python(fitting)
            return (None, errors) if errors else (built, [])
        except RegistryError as error:  # An option is itself a choice, and a wrong one.
            return None, [*errors, error]
        except ValidationError as error:
            return None, errors + [self._unfit(kind, detail) for detail in error.errors()]

    def _unknown(self, kind: object) -> RegistryError:
        if kind is None:
            hint = f"Known kinds: {', '.join(self.kinds())}"
            return RegistryError(f"The {self.noun} needs a `kind`.", hint=hint)
        hint = nearest(str(kind), self.kinds(), "Known kinds")
        return RegistryError(f"There is no {self.noun} called {kind!r}.", hint=hint)

    def _unfit(self, kind: str, detail: ErrorDetails) -> RegistryError:
        message, hint = in_words(detail)
        if not detail["loc"]:
            return RegistryError(f"The {self.noun} {kind!r}: {message}", hint=hint)
        key = ".".join(str(step) for step in detail["loc"])
        hint = hint or self._advice(kind, str(detail["loc"][0]))
        return RegistryError(f"The {self.noun} {kind!r}: {key} {message}", hint=hint, key=key)

    def _advice(self, kind: str, option: str) -> str | None:
        """What the option itself says to whoever got it wrong."""
        hints = get_type_hints(self._choices[kind], include_extras=True)
        about = getattr(hints[option], "__metadata__", ())
        return next((each.words for each in about if isinstance(each, Advised)), None)
