"""Is the text that regions are to read there, and is it what it is taken for?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco_cli.data import NamesHeldout, datasets
from diloco_cli.data.heldout import HeldoutText
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


def text(spec: RunSpec, regions: Iterable[str]) -> Iterator[Check]:
    """Looks at the files of these regions, every different `data` once."""
    looked: list[dict[str, object]] = []
    for name in regions:
        data = spec.data_of(name)
        # Whoever has a trainer of its own may read anything.
        if data in looked or spec.region(name).trainer is not None:
            continue
        looked.append(data)
        yield from _text(str(data["kind"]), data, name if spec.region(name).data else "")


def _text(kind: str, data: dict[str, object], name: str) -> Iterator[Check]:
    own = f" of {name}" if name else ""
    try:
        dataset = datasets.build(data)
        files = dataset.find()
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
    if heldout and (file := _dominant(heldout)):
        yield Check(
            "held out",
            "warn",
            f"{percent(heldout.files[0].share)} of the held-out text{own} is {file}",
            "The held-out loss is about that file; leave it out, or choose another data.heldout.",
        )
    what = f"{len(files)} file{'s' * (len(files) != 1)}" if kind == "text" else f"kind {kind}"
    yield Check("data", "ok", f"{what}{own}; held out: {heldout.extent}" if heldout else what + own)


def _as_text(path: Path) -> Check:
    fix = "data: {kind: jsonl, files: […], tokenizer: …} reads the text in it."
    return Check("data", "warn", f"{path.name} is read as it is: names, braces and quotes too", fix)


def _dominant(heldout: HeldoutText) -> str:
    """The file that is most of the held-out text; empty if none is."""
    first = heldout.files[0] if heldout.files else None
    if first is None or len(heldout.files) < FEW or heldout.documents is not None:
        return ""
    return first.path if first.share >= MOST_OF else ""
