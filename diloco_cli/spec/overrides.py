"""What changes when the command line says `--set sync.quorum=2`?

The value is read as YAML and put where the file would have had it, with a mark that
names the override, so that every later check treats it like any other value.
"""

from __future__ import annotations

from typing import Any

from diloco_cli.spec.rules import Path, dotted
from diloco_cli.spec.secrets import is_secret
from diloco_cli.spec.yaml_source import Document, SourcePosition, YamlFlaw, read


def override(document: Document, assignment: str) -> None:
    """Puts one `a.b.c=value` in place; `regions.0.speed` counts list items from 0."""
    key, equals, text = assignment.partition("=")
    steps = key.strip().split(".")
    value = read(text, "")
    paths = [tuple(steps), *value.keys]
    hidden = any(is_secret(step) for path in paths for step in path)
    mark = SourcePosition(f"--set {key.strip()}=…" if hidden else f"--set {assignment}")
    if not equals or not all(steps):
        hint = "For example --set sync.quorum=2"
        document.flaws.append(YamlFlaw((), mark, "is not KEY=VALUE", hint))
    elif value.flaws:
        document.flaws += [YamlFlaw((), mark, flaw.message, flaw.hint) for flaw in value.flaws]
    elif isinstance(document.data, dict):
        try:
            path = _put(document, steps, value.data, mark)
        except _NoSuchPlace as error:
            document.flaws.append(YamlFlaw((), mark, *error.args))
        else:
            _remember(document, path, value, mark)


class _NoSuchPlace(Exception):
    """A path that leads nowhere: message and hint."""


def _put(document: Document, steps: list[str], value: Any, mark: SourcePosition) -> Path:
    """Walks to where the value belongs, making sections on the way, and puts it there."""
    at: Any = document.data
    path: Path = ()
    for step in steps[:-1]:
        key = _key(at, step, path)
        path = (*path, key)
        if isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
            document.keys[path] = document.values[path] = mark
        at = at[key]
    key = _key(at, steps[-1], path)
    at[key] = value
    return (*path, key)


def _key(at: Any, step: str, path: Path) -> str | int:
    if isinstance(at, dict):
        return step
    if not isinstance(at, list):
        message = f"{dotted(path)} is {at!r}, so it has no key {step!r}"
        raise _NoSuchPlace(message, f"Set {dotted(path)} itself, or another key.")
    if not (step.isascii() and step.isdigit() and int(step) < len(at)):
        message = f"{dotted(path)} is a list of {len(at)}; it has no item {step!r}"
        hint = f"Items count from 0 to {len(at) - 1}." if at else f"Set {dotted(path)} itself."
        raise _NoSuchPlace(message, hint)
    return int(step)


def _remember(document: Document, path: Path, value: Document, mark: SourcePosition) -> None:
    for marks in (document.keys, document.values):
        for old in [old for old in marks if old[: len(path)] == path]:
            del marks[old]
    document.keys |= {path: mark} | {(*path, *inner): mark for inner in value.keys}
    document.values |= {(*path, *inner): mark for inner in value.values}
