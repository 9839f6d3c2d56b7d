"""Which text is held out, and how much of it is each file?

The held-out loss says nothing about text that its files are not like: one generated table
among them can be half of it. So they are listed, by `diloco validate` and in every region's
folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from diloco_cli.observe.units import bytes_, percent
from diloco_cli.system.files import keep_bytes

LIST = "heldout.json"
"""The list in a region's folder."""
NAMED = 3
"""Files that a sentence names; the list has all."""


@dataclass(frozen=True)
class HeldoutFile:
    path: str
    """Below the folder that all text lies in."""
    bytes: int
    """Held out: all of the file, or so much of its end."""
    of: int
    """Bytes of the file."""
    share: float
    """Of the held-out text."""


@dataclass(frozen=True)
class HeldoutText:
    folder: str
    bytes: int
    of: int
    """Bytes of the whole text."""
    files: tuple[HeldoutFile, ...]
    """Largest first."""
    documents: int | None = None
    """Held out, where that is by documents and not by files."""

    @classmethod
    def of_files(cls, paths: Sequence[Path], shares: Mapping[Path, float]) -> Self:
        """Counts what is held out when these shares of these files are."""
        folder = os.path.commonpath([path.parent for path in paths])
        sizes = {path: path.stat().st_size for path in paths}
        held = {
            path: sizes[path] - int(sizes[path] * (1 - share)) for path, share in shares.items()
        }
        total = sum(held.values())
        files = [
            HeldoutFile(os.path.relpath(path, folder), size, sizes[path], size / total)
            for path, size in held.items()
            if size
        ]
        ranked = sorted(files, key=lambda file: (-file.bytes, file.path))
        return cls(folder, total, sum(sizes.values()), tuple(ranked))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a list that `write` wrote; None if there is none."""
        try:
            found = json.loads(path.read_text())
            files = tuple(HeldoutFile(**file) for file in found.pop("files"))
            return cls(files=files, **found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, path: Path) -> None:
        keep_bytes(path, json.dumps(self.as_data(), indent=1).encode(), mode=0o644, durable=False)

    def as_data(self) -> dict[str, Any]:
        files = [{**asdict(file), "share": round(file.share, 4)} for file in self.files]
        said = {**asdict(self), "files": files}
        return {key: value for key, value in said.items() if value is not None}

    @property
    def extent(self) -> str:
        """Says how much it is."""
        whole = all(file.bytes == file.of for file in self.files)
        count = f"{len(self.files)} file{'s' * (len(self.files) > 1)}"
        what = count if whole else f"the end of {count}"
        if self.documents is not None:
            what = f"{self.documents:,} documents of {count}"
        share = f"{self.bytes / self.of:.1%}" if self.of else "–"
        return f"{what}, {bytes_(self.bytes)}, {share} of the text"

    def __str__(self) -> str:
        """Says how much it is, and of which files most of it is made."""
        most = ", ".join(f"{file.path} {percent(file.share)}" for file in self.files[:NAMED])
        return f"{self.extent}: {most}{', …' if len(self.files) > NAMED else ''}"


@runtime_checkable
class NamesHeldout(Protocol):
    """A dataset that can say which files it holds out; optional."""

    def held_out(self) -> HeldoutText: ...
