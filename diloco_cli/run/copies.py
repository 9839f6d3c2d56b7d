"""Copies of a server's folder: made while it runs, and brought back.

    FOLDER/20261118T112405Z/    spec, server/, certs/: whole, a state that the server once was in
    FOLDER/newest               the last one that is whole

The journal is copied first: whatever it speaks of is copied after it and is there, because a
server keeps what is merged for some versions more. If a file goes all the same, the copy is
begun again. A file that the last copy has already is linked, not copied.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.run.folder import RESOLVED, cannot_write, spec_base
from diloco_cli.server.store.run_identity import all_runs_before, run_of
from diloco_cli.spec.load import load_spec
from diloco_cli.system.files import keep_bytes, sync_file, sync_folder
from diloco_cli.system.locks import Busy, FileLock

LEFT_OUT = ("lock", "address.json", "cache", "parts")
"""What belongs to the process that runs there, or travels again; not to the run."""
NEWEST, CERTS, CURRENT, JOURNAL = "newest", "certs", "spec.current.yaml", "journal"
LOCK = "lock"
TRIES = 5


def back_up(
    run: Path, to: Path, *, keep: int = 3, stopped: Callable[[], bool] = lambda: False
) -> Path:
    """Makes a whole copy of a run's server below `to`, and says where; older ones go.

    A command that is killed on the way leaves the copies before as they were. `stopped` is asked
    between two files, and raises Interrupted if so.
    """
    if not (run / "server" / JOURNAL).exists():
        raise SpecError(
            f"{run} has nothing to back up: there is no server/{JOURNAL} in it.",
            hint="Name the run folder on the server's host.",
        )
    if to.resolve().is_relative_to(run.resolve()):
        raise SpecError(f"{to} is inside {run}.", hint="Back up to another disk.")
    try:
        to.mkdir(parents=True, exist_ok=True)
        with FileLock(to / LOCK, mode=0o600).held():
            return _back_up(run, to, keep, stopped)
    except Busy as busy:
        raise SpecError(
            f"Process {busy.pid} is making a copy in {to} just now.",
            hint="Stop that one, or give this one another folder with --to.",
        ) from None
    except OSError as error:
        raise StoreError(
            f"{error.filename or to} cannot be written: {error.strerror}.",
            hint="Free some space or fix the permissions, or choose another folder with --to. "
            "The copies that were made before are as they were.",
        ) from None


class Interrupted(Exception):
    """Somebody asked for the end while a copy was made; nothing of it is left."""


def _back_up(run: Path, to: Path, keep: int, stopped: Callable[[], bool]) -> Path:
    last = to / NEWEST
    before = last.resolve() if last.exists() else None
    if before:
        _refuse_other_run(run / "server", before, to)
    draft = to / ".copy.draft"
    try:
        for left in range(TRIES - 1, -1, -1):
            shutil.rmtree(draft, ignore_errors=True)
            try:
                _copy_run(run, draft, before, stopped)
                break
            except FileNotFoundError:
                if not left:
                    raise
        copy = _name(to)
        os.rename(draft, copy)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # It would keep a full disk full.
    link = to / ".newest.draft"
    link.unlink(missing_ok=True)
    link.symlink_to(copy.name)
    os.replace(link, last)
    sync_folder(to)
    for old in sorted(path for path in to.iterdir() if _is_copy(path))[:-keep]:
        shutil.rmtree(old)
    return copy


def _refuse_other_run(server: Path, copy: Path, to: Path) -> None:
    """Raises if `to` holds copies of a run that this one does not continue: they would go."""
    there, here = run_of(copy / "server"), run_of(server)
    if there in (None, here) or there in all_runs_before(server):
        return
    raise SpecError(
        f"{to} holds copies of another run, {there} ({_name_of(copy)}), which run {here} "
        f"({_name_of(server.parent)}) does not continue.",
        hint="Give each run a folder of its own with --to; copies of the other would be removed.",
    )


def _name_of(folder: Path) -> str:
    try:
        return load_spec(folder / RESOLVED).spec.name
    except (DilocoError, OSError):
        return "whose spec is not to be read"


def _name(to: Path) -> Path:
    """After the time of day, and later than any that is there."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = [path.name for path in to.iterdir() if _is_copy(path)]
    number = sum(each.startswith(name) for each in names)
    return to / (f"{name}-{number}" if number else name)


def _is_copy(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.name[:1].isdigit()


def _copy_run(run: Path, draft: Path, before: Path | None, stopped: Callable[[], bool]) -> None:
    draft.mkdir(mode=0o700)
    _copied(run / "server", draft / "server", before and before / "server", stopped)
    for name in (RESOLVED, CURRENT):
        if (run / name).exists():
            shutil.copy2(run / name, draft / name)
    certs = load_spec(run / RESOLVED).spec.server.certs
    if certs and (spec_base(run) / certs).is_dir():
        shutil.copytree(spec_base(run) / certs, draft / CERTS)
    for path in [*draft.rglob("*"), draft]:
        sync_file(path)


def newest_copy(copy: Path) -> Path:
    """The copy that a folder of copies means; one that is a copy itself means itself."""
    return (copy / NEWEST).resolve() if (copy / NEWEST).is_dir() else copy


def bring_back(copy: Path, folder: Path) -> None:
    """Copies `server/` and the spec to where a server can be started."""
    home = folder / "server"
    if home.exists():
        raise SpecError(
            f"{home} exists already.",
            hint=f"Move it away if its run is lost: mv {home} {home}.lost",
        )
    spec = (copy / RESOLVED).read_bytes()
    if (folder / RESOLVED).exists() and (folder / RESOLVED).read_bytes() != spec:
        raise SpecError(
            f"{folder / RESOLVED} is the spec of another run.", hint="Choose another --dir."
        )
    draft = folder / ".server.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        _copied(copy / "server", draft, None)
        for path in [*draft.rglob("*"), draft]:
            sync_file(path)
        keep_bytes(folder / RESOLVED, spec, mode=0o644)
        os.rename(draft, home)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise cannot_write(Path(error.filename or folder), error) from None


def bring_back_certs(copy: Path) -> Path | None:
    """Copies the certificates to where the spec looks for them; None if there is nothing to do."""
    certs = load_spec(copy / RESOLVED).spec.server.certs
    if not certs or not (copy / CERTS).is_dir() or Path(certs).exists():
        return None
    try:
        shutil.copytree(copy / CERTS, certs)
    except OSError as error:
        raise cannot_write(Path(certs), error) from None
    return Path(certs)


def _copied(
    source: Path,
    draft: Path,
    before: Path | None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Copies a server's folder, its journal first; what `before` has already is linked."""

    def copy_file(old: str, new: str) -> str:
        if stopped():
            raise Interrupted
        known = before / Path(new).relative_to(draft) if before else None
        if known and known.name != JOURNAL and _same(Path(old), known):
            os.link(known, new)
        else:
            shutil.copy2(old, new)
        return new

    draft.mkdir(mode=0o700)
    names = sorted((path.name for path in source.iterdir()), key=lambda name: name != JOURNAL)
    for name in names:
        if name in LEFT_OUT or name.endswith(".draft"):
            continue
        if (source / name).is_dir():
            _copy_tree(source / name, draft / name, copy_file)
        else:
            copy_file(str(source / name), str(draft / name))
    if not (draft / JOURNAL).exists():
        raise StoreError(f"{source} has no journal.", hint="Restore from another copy.")


def _copy_tree(source: Path, draft: Path, copy_file: Callable[[str, str], str]) -> None:
    try:
        shutil.copytree(
            source,
            draft,
            ignore=shutil.ignore_patterns("*.draft"),
            copy_function=copy_file,
        )
    except shutil.Error as error:
        # It collects what went wrong; one file that is gone is enough to begin again.
        for old, _, why in error.args[0]:
            if not Path(old).exists():
                raise FileNotFoundError(2, "was removed while it was copied", old) from None
            raise OSError(5, why, old) from None


def _same(one: Path, other: Path) -> bool:
    try:
        a, b = one.stat(), other.stat()
    except FileNotFoundError:
        return False
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)
