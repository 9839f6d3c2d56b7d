"""Which files does a path or a pattern of a spec mean?"""

from __future__ import annotations

import glob
import os
from pathlib import Path

from diloco_cli.errors import SpecError


def matching_files(patterns: tuple[str, ...]) -> list[Path]:
    """Lists the files of `data.files`, sorted, each once; says which pattern has none."""
    found: set[Path] = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = {Path(match).resolve() for match in matches if os.path.isfile(match)}
        if not files:
            raise _nothing(pattern, matches)
        found |= files
    return sorted(found)


def _nothing(pattern: str, matches: list[str]) -> SpecError:
    if folders := sorted(match.rstrip("/") for match in matches if os.path.isdir(match)):
        return SpecError(
            f"data.files: {pattern!r} is a folder, not a file.",
            hint=f"{folders[0]}/* means the files in it, {folders[0]}/**/* those of any depth.",
        )
    where = "" if os.path.isabs(os.path.expanduser(pattern)) else f" in {Path.cwd()}"
    return SpecError(
        f"data.files: no file matches {pattern!r}{where}.",
        hint="Check the spelling; paths are relative to the folder of the spec.",
    )
