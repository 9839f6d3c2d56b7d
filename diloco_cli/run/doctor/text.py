"""Is the text that regions are to read there, is it what it is taken for, and is it enough?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from diloco_cli.data import LooksAhead, NamesHeldout, datasets
from diloco_cli.data.first_bytes import HINTS, LOOKED_AT, kind_of
from diloco_cli.data.heldout import HeldoutText
from diloco_cli.data.small_corpora import SmallCorpus
from diloco_cli.data.sources import TextSource, documents
from diloco_cli.errors import DilocoError
from diloco_cli.observe.units import percent
from diloco_cli.run.doctor.host import Check
from diloco_cli.spec.schema import RunSpec

MOST_OF = 0.4
"""Of the held-out text, in one file, from which on the loss is about that file."""
FEW = 3
"""Files of which one is bound to be most."""
LINES = (".jsonl", ".ndjson")
READ_AT_ONCE = ("text", "tokens")
"""Kinds whose held-out part is known without reading all of the text."""
SAMPLED = 64
"""Files that are opened, and documents that are read of each: all of them would take minutes."""


def text(spec: RunSpec, regions: Iterable[str]) -> Iterator[Check]:
    """Looks at the files of these regions, every different `data` once."""
    looked: list[tuple[dict[str, object], int]] = []
    for name in regions:
        data, sequence = spec.data_of(name), spec.inner_of(name).sequence
        # Whoever has a trainer of its own may read anything.
        if (data, sequence) in looked or spec.region(name).trainer is not None:
            continue
        looked.append((data, sequence))
        yield from _text(data, sequence, name if spec.region(name).data else "")


def _text(data: dict[str, object], sequence: int, name: str) -> Iterator[Check]:
    kind, own = str(data["kind"]), f" of {name}" if name else ""
    try:
        dataset = datasets.build(data)
        files = dataset.find()
        if isinstance(dataset, SmallCorpus):
            _sample(files, dataset.field)
        if isinstance(dataset, LooksAhead):
            dataset.look(sequence)
        heldout = None
        if kind in READ_AT_ONCE and isinstance(dataset, NamesHeldout):
            heldout = dataset.held_out()
    except DilocoError as error:
        yield Check(
            "data", "fail", f"{error.message}{own and f' ({own.strip()})'}", error.hint or ""
        )
        return
    if kind == "text" and (lines := [path for path in files if path.suffix in LINES]):
        yield _as_text(lines[0])
    if kind == "text":
        yield from _hardly_text(files)
    if heldout and (file := _dominant(heldout)):
        yield Check(
            "held out",
            "warn",
            f"{percent(heldout.files[0].share)} of the held-out text{own} is {file}",
            "The held-out loss is about that file; leave it out, or choose another data.heldout.",
        )
    what = f"{len(files)} file{'s' * (len(files) != 1)}" if kind == "text" else f"kind {kind}"
    yield Check("data", "ok", f"{what}{own}; held out: {heldout.extent}" if heldout else what + own)


def _sample(files: Sequence[Path], field: str) -> None:
    """Reads the first documents of some files; raises what reading all of them would."""
    for path in files[:SAMPLED]:
        for _ in islice(documents(TextSource.of(path), field), SAMPLED):
            pass


def _hardly_text(files: Sequence[Path]) -> Iterator[Check]:
    """Bytes are trained on whatever they are, but hardly anybody means these."""
    for path in files[:SAMPLED]:
        with path.open("rb") as file:
            what = kind_of(file.read(LOOKED_AT), strict=True)
        if what:
            fix = "It is trained on byte by byte; leave it out unless that is meant."
            yield Check("data", "warn", f"{path.name} looks like {what}", HINTS.get(what, fix))
            return


def _as_text(path: Path) -> Check:
    fix = "data: {kind: jsonl, files: […], tokenizer: …} reads the text in it."
    return Check("data", "warn", f"{path.name} is read as it is: names, braces and quotes too", fix)


def _dominant(heldout: HeldoutText) -> str:
    """The file that is most of the held-out text; empty if none is."""
    first = heldout.files[0] if heldout.files else None
    if first is None or len(heldout.files) < FEW or heldout.documents is not None:
        return ""
    return first.path if first.share >= MOST_OF else ""
