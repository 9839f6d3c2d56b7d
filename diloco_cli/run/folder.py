"""Whose folder is it? Locks, finding, setting aside: the run folder as commands see it.

my-run/run.yaml             paths in it are relative to my-run/, wherever a command is started
my-run/runs/NAME            its run; a spec of another name has it in the shell's folder
FOLDER/spec.folder          the folder that paths in its spec are relative to, seen from FOLDER
FOLDER/run.lock             held by `diloco run` for as long as it lives
FOLDER/server/address.json  where the server listens, or listened last
FOLDER/summary.json         what it came to
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diloco_cli.errors import LinkError, SpecError, StoreError, WireError
from diloco_cli.observe.status import Summary
from diloco_cli.system.files import keep_bytes
from diloco_cli.system.locks import Busy, FileLock

RUNS = Path("runs")
RESOLVED = "spec.resolved.yaml"
KEPT = (RESOLVED, "spec.current.yaml")
"""Specs that a run keeps in its folder; `spec.folder` says what paths in them are relative to."""
BASE = "spec.folder"
PROJECT = "run.yaml"
"""A spec of this name has its runs beside it, whoever starts them; `diloco init` writes one."""
EARLY = ("run.lock", "lost+found")


@dataclass(frozen=True)
class Target:
    """What SPEC, FOLDER or URL on a command line meant."""

    url: str | None
    folder: Path | None

    def __str__(self) -> str:
        return str(self.folder or self.url)


class SpecPlace:
    """The folder that the paths of a spec are relative to, which becomes the working folder.

    Paths from the command line are relative to the shell's folder all the same.
    """

    def __init__(self, spec_file: Path) -> None:
        self.file, self._shell = spec_file, Path.cwd()
        home = spec_file.absolute().parent
        if spec_file.name in KEPT:
            home = spec_base(home)
        self._moved = spec_file.is_file() and home.resolve() != self._shell.resolve()
        if self._moved:
            self.file = spec_file.absolute()
            if token := os.environ.get("DILOCO_TOKEN_FILE"):
                os.environ["DILOCO_TOKEN_FILE"] = str(self._shell / Path(token).expanduser())
            os.chdir(home)

    def path(self, given: Path) -> Path:
        """A path from the command line."""
        return self._shell / given if self._moved else given

    def run_folder(self, name: str, given: Path | None = None) -> Path:
        """Where the run is kept: in the folder that was given, or else where all look for it."""
        if given is not None:
            return self.path(given)
        return default_folder(self.file, name, shell=self._shell if self._moved else Path())


def default_folder(spec_file: Path, name: str, *, shell: Path = Path()) -> Path:
    """Where the run of a spec is kept when nobody says otherwise."""
    if spec_file.name in KEPT:
        return spec_file.parent
    beside = spec_file.parent if spec_file.name == PROJECT else shell
    return beside / RUNS / name


def keep_spec_base(folder: Path) -> None:
    """Writes down, for later commands, that the working folder is where the spec's paths begin."""
    keep_bytes(folder / BASE, os.path.relpath(Path.cwd(), folder.resolve()).encode(), mode=0o644)


def spec_base(folder: Path) -> Path:
    """The folder that the paths of a run's spec are relative to: the shell's if nobody knows."""
    try:
        base = (folder.resolve() / (folder / BASE).read_text("utf-8")).resolve()
    except (OSError, ValueError):
        return Path.cwd()
    return base if base.is_dir() else Path.cwd()


def find(target: str | None) -> Target:
    """Finds the run that was meant: a URL, a folder, a spec, or the newest run here."""
    if target is None:
        target = os.environ.get("DILOCO_SERVER") or str(_newest())
    if target.startswith(("http://", "https://")):
        return Target(target.rstrip("/"), None)
    path = Path(target)
    if path.is_dir() and not _holds_a_run(path) and (path / PROJECT).is_file():
        path /= PROJECT
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        from diloco_cli.spec.load import load_spec

        return _in_folder(default_folder(path, load_spec(path).spec.name))
    if _holds_a_run(RUNS / target):
        return _in_folder(RUNS / target)
    raise SpecError(
        f"{target} is neither a run folder, nor a run spec, nor a URL.",
        hint=_known_runs(),
    )


class ServerAddress(NamedTuple):
    """Where the server of a folder listens, or listened last; empty if it never did."""

    url: str | None
    pid: int | None


def address_of(folder: Path) -> ServerAddress:
    address = read_json(folder / "server" / "address.json")
    return ServerAddress(address.get("url"), address.get("pid"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def last_summary(folder: Path) -> Summary | None:
    """Reads summary.json unless there is none, or the run went on after it was written."""
    summary = folder / "summary.json"
    address = folder / "server" / "address.json"
    with contextlib.suppress(OSError):
        if address.exists() and address.stat().st_mtime > summary.stat().st_mtime:
            return None
        with contextlib.suppress(WireError):
            return Summary.read(summary.read_bytes())
    return None


def heldout_rows(folder: Path) -> list[tuple[str, str]]:
    """Says what the held-out text of the regions on this host is made of."""
    from diloco_cli.data.heldout import LIST, HeldoutText

    lists = sorted(folder.glob(f"regions/*/{LIST}"))
    regions: dict[str, list[str]] = {}
    for path in lists:
        if found := HeldoutText.read(path):
            regions.setdefault(str(found), []).append(path.parent.name)
    if len(regions) < 2:
        return [("held-out text", text) for text in regions]
    return [(f"held-out text of {', '.join(names)}", text) for text, names in regions.items()]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder for one `diloco run`; the kernel lets go when the process ends."""
    lock = FileLock(folder / "run.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Busy as busy:
        raise SpecError(
            f"{folder} is being run by process {busy.pid}.",
            hint=f"Watch it with `diloco status {folder}`, stop it with `diloco stop "
            f"{folder}`, or choose another folder with --dir.",
        ) from None
    except OSError as error:
        raise cannot_write(folder, error) from None
    try:
        yield
    finally:
        lock.release()


def runner_of(folder: Path) -> int | None:
    """Says which process runs this folder; None when there is none."""
    pid = FileLock(folder / "run.lock").holder()
    return int(pid) if pid and pid.isdigit() else None


def is_going_on(folder: Path) -> bool:
    """Says whether a process of this host works on the run: its server, a region, or both."""
    locks = [folder / "run.lock", folder / "server" / "lock", *folder.glob("regions/*/lock")]
    return not all(FileLock(path).is_free() for path in locks)


def refuse_foreign(folder: Path) -> None:
    """Raises unless a run may live here: no folder yet, an empty one, or that of a run."""
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file, not a folder.", hint="Choose another --dir.")
    if not folder.is_dir() or _holds_a_run(folder):
        return
    names = sorted(path.name for path in folder.iterdir())
    # A start that was killed early leaves no more than these; a disk's own folder is nobody's.
    early = (RESOLVED, f".{RESOLVED}")
    others = [name for name in names if name not in EARLY and not name.startswith(early)]
    if others == ["regions"] and _is_bare(folder / "regions"):
        return
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise SpecError(
            f"{folder} is not a run folder: it holds {', '.join(others[:3])}{more}, and no "
            f"{RESOLVED}.",
            hint="Choose another --dir: an empty folder, or one that does not exist yet.",
        )


def _is_bare(folder: Path) -> bool:
    """Whether a worker has begun here and could write nothing, on a full disk for example."""
    return all(path.is_dir() or not path.stat().st_size for path in folder.rglob("*"))


def refuse_served(folder: Path) -> None:
    """Raises when a server has this folder: a second one is a mistake of whoever starts it."""
    if pid := FileLock(folder / "server" / "lock").holder():
        raise SpecError(
            f"{folder / 'server'} is in use by another server (process {pid}).",
            hint="Stop that one with `diloco stop`, or use another folder with --dir.",
        )


def set_aside(folder: Path) -> Path | None:
    """Moves an old run out of the way, to FOLDER.old-N; None when there is none."""
    if not _holds_a_run(folder):
        return None
    with held(folder):
        _refuse_lived_in(folder)
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        folder.rename(aside)
    return aside


def _refuse_lived_in(folder: Path) -> None:
    """Raises while processes write here: moved away, they would write into the next run."""
    locks = [folder / "server" / "lock", *folder.glob("regions/*/*lock")]
    if busy := sorted({lock.parent.name for lock in locks if not FileLock(lock).is_free()}):
        raise SpecError(
            f"{folder} cannot be set aside: {', '.join(busy)} still run there.",
            hint=f"`diloco stop {folder}` ends them. What a killed `diloco run` left behind ends "
            "by itself within a minute.",
        )


def is_a_regions(folder: Path) -> bool:
    """Says whether only regions live here, as on a host that trains for a server elsewhere."""
    return (folder / "regions").is_dir() and not (folder / "server").is_dir()


def server_elsewhere(folder: Path, command: str) -> LinkError:
    return LinkError(
        f"{folder} has only regions; its server runs on another host.",
        hint=f"Name the server: `diloco {command} URL`, or set DILOCO_SERVER to its URL.",
    )


def cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written: {error.strerror}.",
        hint="Free some space or fix the permissions, or choose another folder with --dir.",
    )


def _in_folder(folder: Path) -> Target:
    if not _holds_a_run(folder):
        raise SpecError(f"{folder} holds no run.", hint=_known_runs())
    return Target(address_of(folder).url, folder)


def _holds_a_run(folder: Path) -> bool:
    return (folder / RESOLVED).is_file()


def _newest() -> Path:
    runs = _runs()
    if not runs:
        raise SpecError(
            f"There is no run below {RUNS.resolve()}.",
            hint="Name a run folder, a run spec or a server's URL, or start one with `diloco run`.",
        )
    return max(runs, key=_last_touched)


def _runs() -> list[Path]:
    return sorted(path.parent for path in RUNS.glob(f"*/{RESOLVED}"))


def _last_touched(folder: Path) -> float:
    signs = (folder / RESOLVED, folder / "events.jsonl", folder / "run.lock")
    return max(map(_touched, signs))


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _known_runs() -> str:
    known = ", ".join(map(str, _runs()))
    return f"Runs here: {known}." if known else f"There is no run below {RUNS.resolve()} either."
