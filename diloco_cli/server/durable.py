"""Files that are there after a power cut, or not there at all.

    write a draft ──▶ fsync it ──▶ rename it ──▶ fsync the folder

The order must not change. Without the first fsync the new name can show an empty file,
without the second the name itself can be lost, and a journal would speak of a file that
is gone. Whoever reads a folder sees old files and new files, never half of one; drafts
that a crash leaves behind are removed at the next start.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from diloco_cli.errors import StoreError

FULL = (errno.ENOSPC, errno.EDQUOT)
_count = itertools.count()


class DiskFull(StoreError):
    """There is no room now. Nothing was made visible; the same call may work later."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk says into our words, with the file it said it about."""
    try:
        yield
    except OSError as error:
        raise _in_words(path, error.errno, error.strerror or str(error)) from error
    except SafetensorError as error:  # Carries the number of the OS error in its text only.
        number = next((each for each in FULL if f"os error {each}" in str(error)), None)
        raise _in_words(path, number, str(error)) from error


def _in_words(path: Path, number: int | None, said: str) -> StoreError:
    if number in FULL:
        return DiskFull(
            f"There is no room left for {path}: {said}.",
            hint="Free some space on this disk; the run then goes on by itself.",
        )
    return StoreError(
        f"{path} could not be written: {said}.",
        hint="Look at the disk and its mount (`dmesg`, `df`), then start the server again.",
    )


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Writes every byte at the current position, however many calls that takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Writes a file that only its owner may read. Not durable yet."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(handle, data)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


sync_folder = sync_file
"""A folder is flushed like a file: this makes the names in it durable."""


def draft_of(path: Path) -> Path:
    """A name beside the file that no other draft has."""
    return path.with_name(f"{path.name}.{next(_count)}.draft")


def keep_files(writers: Mapping[Path, Callable[[Path], None]]) -> None:
    """Makes files of one folder durable, then visible, in that order.

    Each writer fills the draft it is given. Files become visible in the order of the
    mapping, all of them or, after a crash in between, the first ones.
    """
    drafts = {draft_of(path): path for path in writers}
    try:
        for draft, path in drafts.items():
            with disk_errors(path):
                writers[path](draft)
                sync_file(draft)
        for draft, path in drafts.items():
            with disk_errors(path):
                os.replace(draft, path)
        for folder in {path.parent for path in writers}:
            with disk_errors(folder):
                sync_folder(folder)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def keep_bytes(path: Path, data: bytes | memoryview) -> None:
    """Makes one file durable, then visible."""
    keep_files({path: lambda draft: write_bytes(draft, data)})


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
