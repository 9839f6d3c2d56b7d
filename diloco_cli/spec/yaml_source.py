"""What does a YAML file say, and where does it say it?

    text ──events──▶ plain data + a mark (file, line, column) for every key and value

Only the plain part of YAML is read: mappings, lists, text, numbers, true/false, null.
Aliases, anchors, tags, duplicate keys and several documents are flaws. All flaws are
gathered, none is raised, so that one look shows everything.

Numbers follow YAML 1.2 with underscores: `3e-3` and `4_000_000` are numbers, a region
called `no` is not a switch, and there is no infinity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from diloco_cli.spec.rules import Path, dotted

DEEPEST = 16
"""Levels of nesting; the spec itself needs five."""

YamlMapping = dict[str, Any]
"""A mapping as plain data."""

_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+")
_BROKEN = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True)
class SourcePosition:
    """A place in a file, counted from 1; an override on the command line has no line."""

    file: str
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True)
class YamlFlaw:
    path: Path
    mark: SourcePosition
    message: str
    hint: str | None = None


@dataclass
class Document:
    """Plain data, with the places its keys and values came from."""

    data: Any = None
    keys: dict[Path, SourcePosition] = field(default_factory=dict)
    values: dict[Path, SourcePosition] = field(default_factory=dict)
    flaws: list[YamlFlaw] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)
    """Where an alias stood, so that nothing is known about the value."""

    broken: bool = False
    """The text is not YAML at all, so `data` says nothing."""

    def locate(self, path: Path, *, key: bool = False) -> SourcePosition:
        """Finds the value at this path, or the nearest thing around it that exists."""
        for end in range(len(path), -1, -1):
            marks = self.keys if key and end == len(path) else self.values
            if path[:end] in marks:
                return marks[path[:end]]
        return SourcePosition("")


def read(text: str, file: str) -> Document:
    """Reads one YAML document."""
    builder = _Builder(file)
    document = builder.document
    try:
        builder.read(yaml.parse(text, Loader=_LOADER))
    except _TooDeep:
        document.broken = True
    except yaml.MarkedYAMLError as error:
        message = " ".join(part for part in (error.context, error.problem) if part)
        mark = builder.mark(error.problem_mark or error.context_mark)
        flaw = _tab(text, error, file) or YamlFlaw((), mark, f"is not YAML: {message}")
        document.flaws.append(flaw)
        document.broken = True
    except yaml.reader.ReaderError as error:
        # libyaml counts bytes, PyYAML characters; so neither is asked where it was.
        unprintable = yaml.reader.Reader.NON_PRINTABLE.search(text)
        before = text[: unprintable.start() if unprintable else 0].split("\n")
        mark = SourcePosition(file, len(before), len(before[-1]) + 1)
        message = (
            f"is not YAML: it holds the control character {unprintable.group()!r}"
            if unprintable
            else str(error)
        )
        document.flaws.append(YamlFlaw((), mark, message))
        document.broken = True
    return document


def _tab(text: str, error: yaml.MarkedYAMLError, file: str) -> YamlFlaw | None:
    """Finds the tab that YAML stumbled over, if it was one: the eye cannot see it."""
    marks = [mark.line for mark in (error.context_mark, error.problem_mark) if mark]
    lines = text.split("\n")
    for number in range(min(marks, default=0), min(max(marks, default=-1) + 1, len(lines))):
        line = lines[number]
        at = line.find("\t", 0, len(line) - len(line.lstrip()))
        here = error.problem_mark
        if at < 0 and here and here.line == number and line[here.column : here.column + 1] == "\t":
            at = here.column
        if at >= 0:
            hint = "Replace it with spaces; most editors can show tabs."
            return YamlFlaw(
                (), SourcePosition(file, number + 1, at + 1), "is a tab; YAML wants spaces", hint
            )
    return None


def scalar(text: str) -> Any:
    """Says what an unquoted word means: a number, true, false, null, or itself."""
    if text in _WORDS or text.lower() in ("null", "true", "false"):
        return _WORDS[text.lower()]
    try:
        if _WHOLE.fullmatch(text):
            return int(text, 16) if text.startswith("0x") else int(text)
        if _BROKEN.fullmatch(text) and abs(number := float(text)) != float("inf"):
            return number
    except ValueError:  # Thousands of digits: Python refuses, and so does every key we have.
        pass
    return text


class _TooDeep(Exception):
    pass


# libyaml, where PyYAML was built with it, reads six times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Builder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.document = Document(values={(): SourcePosition(file, 1, 1)})

    def mark(self, mark: Any) -> SourcePosition:
        return (
            SourcePosition(self.file, mark.line + 1, mark.column + 1)
            if mark
            else SourcePosition(self.file, 1, 1)
        )

    def flaw(self, path: Path, event: Any, message: str, hint: str) -> None:
        self.document.flaws.append(YamlFlaw(path, self.mark(event.start_mark), message, hint))

    def read(self, events: Iterator[Any]) -> None:
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents == 2:
                    hint = "Keep one; each run has a file of its own."
                    self.flaw((), event, "a second YAML document starts here", hint)
                    return
            elif not isinstance(
                event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)
            ):
                self.document.data = self.value(event, events, ())

    def value(self, event: Any, events: Iterator[Any], path: Path) -> Any:
        self.document.values[path] = self.mark(event.start_mark)
        if len(path) > DEEPEST:
            self.flaw(path, event, f"is nested more than {DEEPEST} levels deep", "Flatten it.")
            raise _TooDeep
        if isinstance(event, yaml.AliasEvent):
            message = f"uses the alias *{event.anchor}; aliases are not read"
            self.flaw(path, event, message, "Write the value out.")
            self.document.unread.append(path)
            return None
        if event.anchor:
            message = f"has the anchor &{event.anchor}; anchors are not read"
            self.flaw(path, event, message, "Remove it and write values out where they are used.")
        if event.tag:
            message = f"has the YAML tag {event.tag}; tags are not read"
            self.flaw(
                path, event, message, "Remove the tag; put text that looks like a number in quotes."
            )
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.items(events, path)
        return self.mapping(events, path)

    def items(self, events: Iterator[Any], path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self.value(event, events, (*path, len(items))))
        return items

    def mapping(self, events: Iterator[Any], path: Path) -> YamlMapping:
        entries: YamlMapping = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.flaw(path, event, "has a key that is not a word", "Keys are plain words.")
                _skip(event, events)
                _skip(next(events), events)
                continue
            inside = (*path, event.value)
            if event.value in entries:
                first = self.document.keys[inside].line
                message = f"is given twice; the first is on line {first}"
                self.flaw(inside, event, message, f"Keep one {dotted(inside)}.")
                _skip(next(events), events)
                continue
            self.document.keys[inside] = self.mark(event.start_mark)
            if event.tag or event.anchor:
                self.flaw(inside, event, "has a tag or an anchor on its key", "Remove it.")
            entries[event.value] = self.value(next(events), events, inside)
        return entries


def _skip(event: Any, events: Iterator[Any]) -> None:
    depth = 0
    while True:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth <= 0:
            return
        event = next(events)
