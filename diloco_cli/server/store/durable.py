"""The server's disk: durable files, and what to say when they cannot be made.

Every error names the file, and a full disk is told from a broken one: the first is waited
for, the second ends the server.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from diloco_cli.errors import StoreError
from diloco_cli.system import files
from diloco_cli.system.files import sync_folder

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What a disk says that takes nothing now and may take it later; nothing was lost then."""


class DiskFull(StoreError):
    """There is no room now. Nothing was made visible; the same call may work later."""


class ReadOnly(DiskFull):
    """The disk was mounted read-only; waited for in the same way."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk says into our words, with the file it said it about."""
    try:
        yield
    except OSError as error:
        what = error.filename or path
        raise _in_words(what, error.errno, error.strerror or str(error)) from error


def _in_words(path: Path | str, number: int | None, said: str) -> StoreError:
    if number == errno.EROFS:
        return ReadOnly(
            f"{path} cannot be written: {said}.",
            hint="Mount this disk for writing again; the run then goes on by itself.",
        )
    if number in FULL:
        return DiskFull(
            f"There is no room left for {path}: {said}.",
            hint="Free some space on this disk; the run then goes on by itself.",
        )
    return StoreError(
        f"{path} could not be written: {said}.",
        hint="Look at the disk and its mount (`dmesg`, `df`), then start the server again.",
    )


def keep_files(writers: Mapping[Path, Callable[[Path], None]], *, steps: str = "") -> None:
    """Makes files durable, then visible, in that order; see `disk.keep_files`."""
    with disk_errors(next(iter(writers))):
        files.keep_files(writers, steps=steps)


def keep_bytes(path: Path, data: bytes | memoryview, *, steps: str = "") -> None:
    """Makes one file durable, then visible."""
    with disk_errors(path):
        files.keep_bytes(path, data, steps=steps)


def make_folder(path: Path) -> None:
    """Makes a folder that only its owner may enter, and those above it, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with disk_errors(path):
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)


def keep_names(folder: Path) -> None:
    """Makes the names of a folder and of all below durable, and its own.

    A server that was killed between making a name visible and flushing it leaves names
    behind that the next one sees, relies on, and would lose with the power.
    """
    below = (path for path in folder.rglob("*") if path.is_dir())
    for path in (folder.parent, folder, *below):
        with disk_errors(path):
            sync_folder(path)


def remove_drafts(folder: Path) -> None:
    """Removes what a crash left half written, here and in the folders below."""
    for pattern in ("*.draft", ".tmp*"):  # The second is how safetensors names its own drafts.
        for path in folder.rglob(pattern):
            path.unlink(missing_ok=True)
