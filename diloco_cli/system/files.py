"""Durable files: after a power cut a file is there whole, or not at all.

    write a draft ──▶ fsync it ──▶ rename it ──▶ fsync the folder

The order must not change. Without the first fsync the new name can show an empty file,
without the second the name itself can be lost after a reader has relied on it. A reader of
the folder sees old files and new files, never half of one. A draft's name begins with a dot
and ends in `.draft`; the next start of the folder's owner removes those that a crash left.

An OSError names the file that was meant. `disk_errors` turns it into a StoreError, and tells
a full or read-only disk, which the server waits for, from a broken one, which ends it.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco_cli.errors import StoreError
from diloco_cli.system.failpoints import reach

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that takes nothing now and may take it later; nothing was lost."""

_count = itertools.count()


class DiskFull(StoreError):
    """There is no room now. Nothing was made visible; the same call may work later."""


class ReadOnly(DiskFull):
    """The disk was mounted read-only; waited for in the same way."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises a StoreError that names the file where the system raises an OSError."""
    try:
        yield
    except OSError as error:
        where, reason = error.filename or path, error.strerror or str(error)
        if error.errno == errno.EROFS:
            raise ReadOnly(
                f"{where} cannot be written: {reason}.",
                hint="Mount this disk for writing again; the run then goes on by itself.",
            ) from error
        if error.errno in FULL:
            raise DiskFull(
                f"There is no room left for {where}: {reason}.",
                hint="Free some space on this disk; the run then goes on by itself.",
            ) from error
        raise StoreError(
            f"{where} could not be written: {reason}.",
            hint="Look at the disk and its mount (`dmesg`, `df`), then start the server again.",
        ) from error


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Writes every byte at the current position, however many calls that takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def allocate(handle: int, size: int) -> bool:
    """Allocates room for a file of `size` bytes; says whether this file system can.

    Raises OSError when the disk is full. `os.posix_fallocate` would write the file byte by
    byte where the file system cannot allocate, which takes far too long.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):  # Not Linux.
        return False
    if call(handle, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
        return False
    raise OSError(number, os.strerror(number))


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o600) -> None:
    """Writes a file, piece after piece. Not durable yet."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        for piece in pieces:
            write_all(handle, piece)
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
    """A name beside the file that no other draft has, in this process or another."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_count)}.draft")


def keep_files(
    writers: Mapping[Path, Callable[[Path], None]], *, durable: bool = True, steps: str = ""
) -> None:
    """Makes files durable, then visible, in that order.

    Each writer fills the draft it is given. Files become visible in the order of the
    mapping, all of them or, after a crash in between, the first ones. Without `durable`
    they are still replaced whole, but a power cut may undo that. `steps` is the first word
    of the failpoints on the way.
    """
    drafts = {draft_of(path): path for path in writers}
    try:
        for draft, path in drafts.items():
            with _naming(path):
                writers[path](draft)
                _reached(steps, "written")
                if durable:
                    sync_file(draft)
                    _reached(steps, "flushed")
        for draft, path in drafts.items():
            with _naming(path):
                os.replace(draft, path)
                _reached(steps, "renamed")
        for folder in {path.parent for path in writers} if durable else ():
            with _naming(folder):
                sync_folder(folder)
                _reached(steps, "kept")
    finally:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def keep_bytes(
    path: Path,
    data: bytes | memoryview,
    *,
    mode: int = 0o600,
    durable: bool = True,
    steps: str = "",
) -> None:
    """Makes one file durable, then visible."""
    writer = {path: lambda draft: write_pieces(draft, (data,), mode)}
    keep_files(writer, durable=durable, steps=steps)


def make_folder(path: Path) -> None:
    """Makes a folder that only its owner may enter, and its parents, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with disk_errors(path):
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)


def sync_names(folder: Path) -> None:
    """Makes the names in a folder and in all folders below durable, and its own name.

    A process that was killed between making a name visible and flushing it leaves names
    behind that the next one sees, relies on, and would lose in a power cut.
    """
    below = (path for path in folder.rglob("*") if path.is_dir())
    for path in (folder.parent, folder, *below):
        with disk_errors(path):
            sync_folder(path)


def remove_drafts(folder: Path) -> None:
    """Removes the drafts that a crash left, in this folder and all below."""
    for path in folder.rglob("*.draft"):
        path.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno:
            error.filename = str(path)
        raise


def _reached(steps: str, what: str) -> None:
    if steps:
        reach(f"{steps}.{what}")
