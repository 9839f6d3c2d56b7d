"""What do the classes themselves say about their options?

Names, types and defaults come from the fields; the meaning from the string under each
field, which only the source has. So nothing is written down twice. Pydantic can read these
strings too (`use_attribute_docstrings`), but does so at every import, which every command
would pay for although few show them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from diloco_cli.registry import Registry

REQUIRED = "required"

_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class OptionDescription:
    name: str
    type: str
    default: Any
    doc: str

    @property
    def shown_default(self) -> str:
        if self.default is REQUIRED:
            return REQUIRED
        return flow(self.default)


@dataclass(frozen=True)
class KindDescription:
    name: str
    doc: str
    options: tuple[OptionDescription, ...]


def kinds_of(registry: Registry[Any]) -> list[KindDescription]:
    """Describes everything that is registered."""
    choices = [(kind, registry.choice(kind)) for kind in registry.kinds()]
    return [
        KindDescription(kind, summary(choice), tuple(options_of(choice)))
        for kind, choice in choices
    ]


def options_of(choice: type) -> Iterator[OptionDescription]:
    """Describes the fields of a registered dataclass."""
    docs, hints = field_docs(choice), get_type_hints(choice, include_extras=True)
    for field in dataclasses.fields(choice):
        if not field.init:
            continue
        default: Any = REQUIRED
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield OptionDescription(
            field.name, in_words(hints[field.name]), default, docs.get(field.name, "")
        )


def keys_of(section: type[BaseModel]) -> Iterator[OptionDescription]:
    """Describes the keys of a section of the run spec."""
    docs = field_docs(section)
    for name, field in section.model_fields.items():
        hint = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        default = REQUIRED if field.is_required() else field.default
        yield OptionDescription(name, in_words(hint), default, docs.get(name, ""))


def summary(thing: type) -> str:
    """Gives the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Reads the strings under the fields of a class and of those it is made from."""
    docs: dict[str, str] = {}
    for part in reversed(owner.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError):  # Built in, or typed at a prompt: there is no source.
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, after in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                doc = after.value if isinstance(after, ast.Expr) else None
                if isinstance(doc, ast.Constant) and isinstance(doc.value, str):
                    docs[field.target.id] = " ".join(doc.value.split())
    return docs


def in_words(hint: Any) -> str:
    """Says what values a type allows, for people who do not read Python."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{in_words(inner[0])} {', '.join(_limits(inner[1:]))}".strip()
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(each) for each in inner if each is not types.NoneType)
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in inner)
    if origin in (tuple, list):
        return f"list of {in_words(inner[0])}"
    if origin is dict or hint is dict:
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "section"
    return _PLAIN.get(hint, getattr(hint, "__name__", str(hint)))


def _limits(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _limits(item.metadata)
        for name, sign in _SIGNS.items():
            if getattr(item, name, None) is not None:
                yield f"{sign} {getattr(item, name)}"
        if getattr(item, "pattern", None):
            yield "of small letters, digits, - and _"


def flow(value: Any) -> str:
    """Writes a value on one line, as it would stand in a spec."""
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(inner) for inner in value) + "]"
    if value is None:
        return "left out"
    return str(value).lower() if isinstance(value, bool) else str(value)
