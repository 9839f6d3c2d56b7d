"""Files and folders that somebody named to be written: can they be, and if not, why?

A file goes into a folder that is there; a folder is made with those above it. What is wrong with
a name is found before any work is done for it, and is the command's fault, exit code 2. Only a
disk without room is not: what was asked for was right.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco_cli.errors import DilocoError, SpecError, StoreError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that has no room for what is written."""


def refuse_file(path: Path, option: str, *, example: str = "FILE") -> None:
    """Raises unless a file of this name can be written."""
    if os.path.isdir(path):  # Unlike Path's, it has an answer for names that cannot be.
        raise SpecError(
            f"{option}: {path} is a folder, not a file.",
            hint=f"Name the file, as in {path / example}.",
        )
    if not os.path.isdir(path.parent):
        raise SpecError(
            f"{option}: there is no folder {path.parent} to write {path.name} into.",
            hint="Make it first, or name a file in another folder.",
        )
    with writing(path, option):
        if os.path.exists(path):
            _refuse_protected(path)
        else:
            draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            draft.unlink()


def refuse_folder(path: Path, option: str) -> None:
    """Raises unless there is a folder of this name that can be written into, or one can be made."""
    there = next(filter(os.path.exists, (path, *path.absolute().parents)), Path("/"))
    if not os.path.isdir(there):
        where = "is a file" if there == path else f"cannot be made: {there} is a file"
        raise SpecError(f"{option}: {path} {where}.", hint=_elsewhere(option))
    with writing(path, option):
        _refuse_protected(there)


def _refuse_protected(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Says which output cannot be written where the system raises an OSError."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(path, option, error) from error


def cannot_be_written(path: Path, option: str, error: Exception) -> DilocoError:
    """What to say about an output that the system does not take."""
    reason = getattr(error, "strerror", None) or error
    said = f"{option}: {path} cannot be written: {reason}."
    if getattr(error, "errno", None) in NO_ROOM:
        return StoreError(said, hint=f"Free some space, or name another place with {option}.")
    return SpecError(said, hint=_elsewhere(option))


def _elsewhere(option: str) -> str:
    return f"Name a place that you may write to with {option}."
