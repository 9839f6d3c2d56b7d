"""Files that are there after a power cut, or not there at all.

    write a draft ──▶ fsync it ──▶ rename it ──▶ fsync the folder

The order must not change. Without the first fsync the new name can show an empty file,
without the second the name itself can be lost, and whoever was told of the file was lied
to. Whoever reads a folder sees old files and new files, never half of one. A draft's name
begins with a dot and ends in `.draft`; those that a crash leaves behind are removed at the
next start of whoever owns the folder.

Errors of the system rise as they are, with the name of the file that was meant.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco_cli.system.failpoints import reach

_count = itertools.count()


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Writes every byte at the current position, however many calls that takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def allocate(handle: int, size: int) -> bool:
    """Takes room for a file of `size` bytes; says whether this disk can do that.

    Raises OSError where there is none. Python's own call would fill the file where the disk
    cannot, byte by byte, and nobody has the time.
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


def write_bytes(path: Path, data: bytes | memoryview, mode: int = 0o600) -> None:
    """Writes a file. Not durable yet."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
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
    """A name beside the file that no other draft has, of this process or another."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_count)}.draft")


def keep_files(
    writers: Mapping[Path, Callable[[Path], None]], *, durable: bool = True, steps: str = ""
) -> None:
    """Makes files durable, then visible, in that order.

    Each writer fills the draft it is given. Files become visible in the order of the
    mapping, all of them or, after a crash in between, the first ones. Without `durable`
    they are replaced as a whole all the same, but a power cut may take them back. `steps`
    is the first word of the failpoints on the way.
    """
    drafts = {draft_of(path): path for path in writers}
    try:
        for draft, path in drafts.items():
            with _about(path):
                writers[path](draft)
                _reached(steps, "written")
                if durable:
                    sync_file(draft)
                    _reached(steps, "flushed")
        for draft, path in drafts.items():
            with _about(path):
                os.replace(draft, path)
                _reached(steps, "renamed")
        for folder in {path.parent for path in writers} if durable else ():
            with _about(folder):
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
    writer = {path: lambda draft: write_bytes(draft, data, mode)}
    keep_files(writer, durable=durable, steps=steps)


@contextmanager
def _about(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno:
            error.filename = str(path)
        raise


def _reached(steps: str, what: str) -> None:
    if steps:
        reach(f"{steps}.{what}")
