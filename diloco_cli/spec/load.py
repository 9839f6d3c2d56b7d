"""Which run does this file describe, and if none, what is wrong with it?

    file, --set ──nodes──▶ plain data ──schema, rules──▶ RunSpec
                                      ╰─▶ problems, each with file:line:column and a hint

Every problem is reported at once. When single values are wrong the rest is still
checked: the wrong values are set aside, and what is said about them is kept to the one
mistake that was made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from diloco_cli.errors import SpecError
from diloco_cli.spec.overrides import override
from diloco_cli.spec.resolved import resolved_yaml, write_resolved
from diloco_cli.spec.rules import MOST_TOKENS, Conflicts, Path, SpecFault, dotted, doubts
from diloco_cli.spec.schema import RunSpec, keys_at
from diloco_cli.spec.secrets import inline_secrets
from diloco_cli.spec.yaml_source import Document, SourcePosition, YamlFlaw, YamlMapping, read
from diloco_cli.validation import in_words

__all__ = [
    "Loaded",
    "Problem",
    "SpecErrors",
    "check_spec",
    "load_spec",
    "resolved_yaml",
    "write_resolved",
]

LARGEST = 1 << 20
"""Bytes of a spec file; a longer one is something else."""

MOST = 200
"""Wrong values reported at once; nobody reads more, and guessing what was meant takes time."""

Check = Callable[[RunSpec], Iterable[SpecFault]]
"""Looks for faults only a higher layer can see, such as kinds that do not exist."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec, and where."""

    file: str
    line: int | None
    column: int | None
    key: str
    message: str
    hint: str | None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(part for part in (place, self.key, self.message) if part)


class SpecErrors(SpecError):
    """Everything that is wrong with one spec."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        if len(problems) == 1:
            super().__init__(str(problems[0]), hint=problems[0].hint)
            return
        lines = [f"{file} is not a run spec, {len(problems)} problems:"]
        for problem in problems:
            lines.append(f"  {problem}")
            lines += [f"    hint: {problem.hint}"] if problem.hint else []
        super().__init__("\n".join(lines))

    def as_data(self) -> list[dict[str, object]]:
        return [asdict(problem) for problem in self.problems]


@dataclass(frozen=True)
class Loaded:
    """A spec that loads, and where each of its keys was given."""

    spec: RunSpec
    document: Document

    def locate(self, path: Path) -> SourcePosition:
        return self.document.locate(path)

    @property
    def warnings(self) -> list[Problem]:
        """What the run can work with, but hardly is meant."""
        return [self.problem(fault) for fault in doubts(self.spec)]

    def problem(self, fault: SpecFault) -> Problem:
        """A fault, and where in the spec it is."""
        return _problem(self.document, fault)


def load_spec(
    path: str | FilePath, overrides: Sequence[str] = (), *, also: Check | None = None
) -> Loaded:
    """Reads a run spec, with `key.path=value` overrides on top, or says all that is wrong."""
    return parse_spec(_text(FilePath(path)), str(path), overrides, also=also)


def parse_spec(
    text: str, file: str, overrides: Sequence[str] = (), *, also: Check | None = None
) -> Loaded:
    """Does what `load_spec` does, for a text that goes by the name `file`."""
    document = read(text, file)
    for assignment in overrides:
        override(document, assignment)
    problems = [_flawed(flaw) for flaw in document.flaws]
    spec = None
    if not document.broken:
        spec, faults = _readings(document, also)
        problems += [_problem(document, fault) for fault in faults]
    if problems or spec is None:
        raise SpecErrors(file, sorted(problems, key=_order))
    return Loaded(spec, document)


def check_spec(data: Mapping[str, Any], name: str, *, also: Check | None = None) -> RunSpec:
    """Makes a spec of plain data that goes by `name`, or says all that is wrong with it."""
    spec, faults = _readings(Document(dict(data)), also)
    if faults or spec is None:
        problems = [
            Problem("", None, None, dotted(fault.path), fault.message, fault.hint)
            for fault in faults
        ]
        raise SpecErrors(name, problems)
    return spec


def _text(path: FilePath) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise SpecError(
            f"There is no run spec {path}.", hint="`diloco init` writes one to start from."
        ) from None
    except IsADirectoryError:
        inside = path / "run.yaml"
        raise SpecError(f"{path} is a folder, not a run spec.", hint=f"Try {inside}.") from None
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}.", hint="Look at its permissions."
        ) from None
    if len(content) > LARGEST:
        raise SpecError(
            f"{path} is larger than 1 MiB, so it is no run spec.",
            hint="Name the YAML file, not the data.",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}.",
            hint="Save it as UTF-8.",
        ) from None


def _readings(document: Document, also: Check | None) -> tuple[RunSpec | None, list[SpecFault]]:
    """Reads as much of the data as makes sense, with every fault found on the way."""
    data = document.data
    if not isinstance(data, dict):
        what = "is empty" if data is None else "is not a mapping of keys"
        hint = "A run spec starts with `spec: 1`; `diloco init` writes one."
        return None, [SpecFault((), what, hint)]
    secrets = list(inline_secrets(document))
    known = [*document.unread, *(fault.path for fault in secrets)]
    spec, faults, aside = _validated(data)
    faults = [*secrets, *_not_about(known, faults)]
    if spec is None:
        spec, more, _ = _validated(_set_aside(data, aside))
        faults += _not_about([*known, *aside], more)
    if spec is not None and also is not None:
        faults += _not_about([*known, *aside], also(spec))
    return spec, faults


def _validated(data: YamlMapping) -> tuple[RunSpec | None, list[SpecFault], list[Path]]:
    try:
        return RunSpec.model_validate(data), [], []
    except ValidationError as error:
        details = error.errors()[:MOST]
    # A list whose every entry is wrong counts as empty, too.
    wrong = {detail["loc"][:-1] for detail in details}
    details = [one for one in details if one["type"] != "too_short" or one["loc"] not in wrong]
    clash = details[0].get("ctx", {}).get("error")
    if isinstance(clash, Conflicts):
        return clash.spec, list(clash.faults), []
    faults, aside = [], []
    for detail in details:
        path: Path = detail["loc"]
        unknown = detail["type"] == "extra_forbidden"
        message, hint = in_words(detail, keys_at(path[:-1]))
        if path == ("spec",) and not unknown:
            message += "; this version reads run specs of version 1"
        hint = _elsewhere(path) or hint if unknown else hint
        faults.append(SpecFault(path, message, hint, on_key=unknown))
        aside.append(path)
    return None, faults, aside


def _elsewhere(path: Path) -> str | None:
    """Says under which section a misplaced key belongs, if it is one."""
    if misplaced := _MISPLACED.get(tuple(map(str, path))):
        return f"It is `{misplaced}`."
    homes = [top for top in keys_at(()) if path[-1] in keys_at((top,)) and top != path[0]]
    return f"It belongs under `{homes[0]}`." if len(path) == 1 and len(homes) == 1 else None


_MISPLACED: dict[tuple[str, ...], str] = {
    ("inner", "learning_rate"): "inner.optimizer.lr",
    ("inner", "lr"): "inner.optimizer.lr",
    ("inner", "weight_decay"): "inner.optimizer.weight_decay",
    ("inner", "warmup"): "inner.schedule.warmup",
    ("inner", "batch_size"): "inner.batch",
    ("inner", "sequence_length"): "inner.sequence",
}
"""What people write who come from elsewhere."""


def _set_aside(data: YamlMapping, paths: list[Path]) -> YamlMapping:
    """Leaves the wrong values out, with stand-ins for those no spec can do without."""
    rest = copy.deepcopy(data)
    for path in paths:
        at: Any = rest
        for step in path[:-1]:
            at = at[step] if _has(at, step) else None
        if isinstance(at, dict):
            at.pop(path[-1], None)
        elif isinstance(at, list) and path[0] == "regions" and isinstance(path[-1], int):
            at[path[-1]] = {}
        elif isinstance(at, list):
            rest.pop(str(path[0]), None)
    rest |= {key: value for key, value in _STAND_INS.items() if not rest.get(key)}
    for number, region in enumerate(rest["regions"]):
        region.setdefault("name", f"unnamed-{number}")
    return rest


_STAND_INS: YamlMapping = {
    "spec": 1,
    "name": "unnamed",
    "budget": {"tokens": MOST_TOKENS},
    "regions": [{"name": "unnamed"}],
}


def _has(at: Any, step: str | int) -> bool:
    if isinstance(at, list):
        return isinstance(step, int) and step < len(at)
    return isinstance(at, dict) and step in at


def _not_about(known: list[Path], faults: Iterable[SpecFault]) -> list[SpecFault]:
    """Leaves out what only follows from mistakes that are reported already."""
    return [
        fault
        for fault in faults
        if not any(
            involved[: len(path)] == path
            for path in known
            for involved in (fault.path, *fault.beside)
        )
    ]


def _problem(document: Document, fault: SpecFault) -> Problem:
    mark = document.locate(fault.path, key=fault.on_key)
    key = dotted(fault.path)
    return Problem(mark.file, mark.line, mark.column, key, fault.message, fault.hint)


def _flawed(flaw: YamlFlaw) -> Problem:
    mark = flaw.mark
    return Problem(mark.file, mark.line, mark.column, dotted(flaw.path), flaw.message, flaw.hint)


def _order(problem: Problem) -> tuple[bool, int, int]:
    """Top to bottom, then what came from the command line."""
    return problem.line is None, problem.line or 0, problem.column or 0
