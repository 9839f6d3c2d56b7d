"""A disk with a page cache: what was written is not yet what a power cut leaves.

The server's files are real ones, in a folder of its own on a file system in memory. The
calls that matter (`os.fsync`, `os.replace`, `os.pwrite` and so on) are watched, whoever
makes them, and kept from their effect when the process that makes them is dead.

    file     after fsync its content is durable; otherwise a cut may leave the old
             content, the new one, or part of it
    name     after fsync of the folder it is durable; otherwise a cut may keep or lose
             each creation, renaming and removal on its own
    EIO      a failed fsync makes nothing durable, and what it could not write counts as
             clean: the next fsync succeeds without having written it
    ENOSPC   writes fail in the middle until there is room again
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from tests.verify.dst.loop import LIFE, Crashed, Loop

PAGE = 512
"""Smaller than real ones, so that small files have several."""

Names = dict[str, int]
REAL = {
    name: getattr(os, name)
    for name in (
        *("open", "close", "write", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync"),
        *("replace", "unlink", "mkdir", "rmdir", "statvfs"),
    )
}


class Disk:
    def __init__(self, root: Path, rng: Random, loop: Loop, trace: Callable[..., None]) -> None:
        self.root, self.rng, self.loop, self.trace = root, rng, loop, trace
        self.step: Callable[[str], None] = lambda what: None
        """Called before every call; may kill the server."""
        self.full = False
        self.failing = 0.0
        """Share of flushes that fail."""
        self.count: Counter[str] = Counter()
        self.open: dict[int, Path] = {}
        self.files: dict[int, bytes] = {}
        """Durable content, by inode."""
        self.lost: dict[int, set[int]] = {}
        """By inode: pages that a failed fsync could not write and that count as written."""
        self.folders: dict[int, Names] = {root.stat().st_ino: {}}
        """Durable names, by inode of the folder."""
        self._ghosts = 0

    # The calls

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Puts the disk between the server and `os`."""
        for name in REAL:
            setattr(os, name, getattr(self, f"_{name}"))
        try:
            yield
        finally:
            for name, real in REAL.items():
                setattr(os, name, real)

    def _ours(self, path: Any) -> Path | None:
        """The path, if it is on this disk and in use by a process that lives."""
        if isinstance(path, int):
            found = self.open.get(path)
        else:
            text = os.fspath(path)
            found = (
                Path(text) if isinstance(text, str) and text.startswith(str(self.root)) else None
            )
        return found

    def _call(self, what: str, path: Path, *, writes: bool = False) -> None:
        """One step of the disk: whoever is dead does not take it, and anybody may die here."""
        self._check_alive()
        self.loop.disk_step()
        self._check_alive()  # Others went on meanwhile.
        self.step(what)
        self.count[what] += 1
        self.trace("disk", what=what, file=str(path)[len(str(self.root)) + 1 :])
        if writes and self.full and self.rng.random() < 0.8:
            self.count["ENOSPC"] += 1
            self.trace("disk", what="ENOSPC", file=path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _check_alive(self) -> None:
        life = LIFE.get()
        if life is None or life.dead:
            raise Crashed

    def _open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        ours = None if more else self._ours(path)
        if ours and flags & os.O_CREAT:
            self._call("create", ours, writes=not ours.exists())
        handle = REAL["open"](path, flags, mode, **more)
        if ours:
            self.open[handle] = ours
        return handle

    def _close(self, handle: int) -> None:
        self.open.pop(handle, None)
        REAL["close"](handle)

    def _write(self, handle: int, data: Any) -> int:
        return self._written("write", handle, data, ())

    def _pwrite(self, handle: int, data: Any, offset: int) -> int:
        return self._written("pwrite", handle, data, (offset,))

    def _pwritev(self, handle: int, pieces: Any, offset: int, flags: int = 0) -> int:
        if self._ours(handle):
            return self._written("pwrite", handle, b"".join(pieces), (offset,))
        return REAL["pwritev"](handle, pieces, offset, flags)

    def _written(self, name: str, handle: int, data: Any, where: tuple[int, ...]) -> int:
        if ours := self._ours(handle):
            try:
                self._call(name, ours, writes=True)
            except OSError:
                # As much as there was room for is there.
                if (some := self.rng.randrange(len(data) + 1)) and self.rng.random() < 0.5:
                    return REAL[name](handle, memoryview(data)[:some], *where)
                raise
            if self.rng.random() < 0.1 and len(data) > 1:
                data = memoryview(data)[: self.rng.randrange(1, len(data))]  # A short write.
            self._is_written(handle, len(data), where)
        return REAL[name](handle, data, *where)

    def _is_written(self, handle: int, size: int, where: tuple[int, ...]) -> None:
        """Pages that are written again will be flushed again."""
        if lost := self.lost.get(os.fstat(handle).st_ino):
            at = where[0] if where else os.lseek(handle, 0, os.SEEK_CUR)
            lost -= set(range(at // PAGE, (at + size - 1) // PAGE + 1))

    def _ftruncate(self, handle: int, length: int) -> None:
        if ours := self._ours(handle):
            self._call("truncate", ours)
        REAL["ftruncate"](handle, length)

    def _fsync(self, handle: int) -> None:
        if (ours := self._ours(handle)) is None:
            return REAL["fsync"](handle)
        self._call("fsync", ours)
        number = os.fstat(handle).st_ino
        if self.failing and self.rng.random() < self.failing:
            self.count["EIO"] += 1
            self.trace("disk", what="EIO", file=str(ours)[len(str(self.root)) + 1 :])
            if not ours.is_dir():
                self._lose(number, _content(handle))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if ours.is_dir():
            self.folders[number] = _names(ours)
        else:
            self._flush(number, _content(handle))
        return None

    _fdatasync = _fsync

    def _lose(self, number: int, content: bytes) -> None:
        old = self.files.get(number, b"")
        lost = self.lost.setdefault(number, set())
        for at in range(0, len(content), PAGE):
            if content[at : at + PAGE] != old[at : at + PAGE]:
                lost.add(at // PAGE)

    def _flush(self, number: int, content: bytes) -> None:
        old, pages = self.files.get(number, b""), []
        lost = self.lost.get(number, set())
        for at in range(0, len(content), PAGE):
            page = content[at : at + PAGE]
            stays = at // PAGE in lost
            pages.append(old[at : at + PAGE].ljust(len(page), b"\0") if stays else page)
        self.files[number] = b"".join(pages)

    def _replace(self, source: Any, target: Any) -> None:
        if ours := self._ours(target):
            self._call("rename", ours)
            self._vanish(ours)
        REAL["replace"](source, target)

    def _unlink(self, path: Any, **more: Any) -> None:
        ours = None if more else self._ours(path)
        if ours:
            self._check_alive()
            if ours.exists():
                self._call("unlink", ours)
                self._vanish(ours)
        REAL["unlink"](path, **more)

    def _vanish(self, path: Path) -> None:
        """A name goes; until its folder is flushed, a cut may bring back what it named."""
        try:
            number = path.stat().st_ino
        except FileNotFoundError:
            return
        folder = self.folders.get(path.parent.stat().st_ino, {})
        if folder.get(path.name) == number:
            self._ghosts -= 1
            folder[path.name] = self._ghosts
            self.files[self._ghosts] = self.files.get(number, b"")
        self.files.pop(number, None)  # File systems use numbers again.
        self.lost.pop(number, None)

    def _mkdir(self, path: Any, mode: int = 0o777, **more: Any) -> None:
        if (ours := self._ours(path)) and not more:
            self._call("mkdir", ours)
        REAL["mkdir"](path, mode, **more)
        if ours and not more:
            self.folders[ours.stat().st_ino] = {}

    def _rmdir(self, path: Any, **more: Any) -> None:
        # What was in it went by calls that are not watched: it comes back empty, if at all.
        ours = None if more.get("dir_fd") is not None else self._ours(path)
        number = ours.stat().st_ino if ours else 0
        REAL["rmdir"](path, **more)
        if ours and self.folders.pop(number, None) is not None:
            names = self.folders.get(ours.parent.stat().st_ino, {})
            if names.get(ours.name) == number:
                self._ghosts -= 1
                names[ours.name] = self._ghosts
                self.folders[self._ghosts] = {}

    def _statvfs(self, path: Any) -> Any:
        if self._ours(path):
            room = 0 if self.full else 1 << 30
            return SimpleNamespace(
                f_bavail=room, f_bfree=room, f_blocks=1 << 31, f_frsize=4096, f_bsize=4096
            )
        return REAL["statvfs"](path)

    # What is left

    def let_go(self) -> None:
        """Closes what a dead process had open; its lock is free again."""
        for handle in list(self.open):
            self._close(handle)

    def cut_power(self) -> None:
        """Leaves what is durable, and of the rest whatever the seed says."""
        self.let_go()
        kept: dict[str, bytes | None] = {}
        self._keep(self.root, self.root.stat().st_ino, "", kept)
        for path in list(self.root.iterdir()):
            shutil.rmtree(path) if path.is_dir() else REAL["unlink"](path)
        self.files, self.lost = {}, {}
        self.folders = {self.root.stat().st_ino: {}}
        for name, content in kept.items():
            path = self.root / name
            if content is None:
                REAL["mkdir"](path)
                self.folders[path.stat().st_ino] = {}
            else:
                path.write_bytes(content)
                self.files[path.stat().st_ino] = content
            self.folders[path.parent.stat().st_ino][path.name] = path.stat().st_ino

    def _keep(self, folder: Path, number: int, below: str, kept: dict[str, bytes | None]) -> None:
        durable, now = self.folders.get(number, {}), _names(folder)
        for name in sorted({*durable, *now}):
            found = durable.get(name)
            if found != now.get(name) and self.rng.random() < 0.5:
                found = now.get(name)
            if found is None:
                continue
            path = folder / name
            current = now.get(name) == found
            if current and path.is_dir():
                kept[below + name] = None
                self._keep(path, found, f"{below}{name}/", kept)
            elif found in self.folders:
                kept[below + name] = None  # A folder that was removed; nobody removes full ones.
            else:
                content = path.read_bytes() if current else self.files.get(found, b"")
                kept[below + name] = self._left_of(found, content)

    def _left_of(self, number: int, content: bytes) -> bytes:
        durable = self.files.get(number, b"")
        for page in self.lost.get(number, ()):
            at = page * PAGE
            old = durable[at : at + PAGE].ljust(len(content[at : at + PAGE]), b"\0")
            content = content[:at] + old + content[at + PAGE :]
        if durable == content:
            return content
        kind = self.rng.random()
        if kind < 0.35:
            return durable
        if kind < 0.5:
            return content
        if kind < 0.75:  # The new length may come before, or without, what belongs there.
            length = self.rng.randrange(min(len(durable), len(content)), len(content) + 1)
            return content[:length]
        pages = []
        for at in range(0, len(content), PAGE):
            new, old = content[at : at + PAGE], durable[at : at + PAGE]
            pages.append(new if self.rng.random() < 0.5 else old.ljust(len(new), b"\0")[: len(new)])
        return b"".join(pages)


def _content(handle: int) -> bytes:
    return os.pread(handle, os.fstat(handle).st_size, 0)


def _names(folder: Path) -> Names:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}
