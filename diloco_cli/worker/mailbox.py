"""The files through which a region's agent and its trainer talk, and which outlive both.

    identity.json      agent     who this folder is; durable before the region joins
    outbox/F.frame     trainer   newest frame of fragment F; durable, replaced, never deleted
    image/F            agent     whole published weights of F as of its newest version; durable
    ema.safetensors    agent     the run's average of its published weights, to be measured once
    fate/F.json        agent     what the server said about the frame in the outbox; may be lost
    calls.json         agent     the server's newest news; may be lost
    terms.json         agent     amendments of the run; durable before the trainer may follow
    spec.yaml          agent     what the trainer trains by: the region's own file with the
                                 amendments over it; durable before the trainer starts
    lanes.json         agent     which lanes of the text are this region's; durable before the
                                 trainer follows
    ready.json         agent     that a trainer that is not ours may join, and under which terms;
                                 there only while the agent is
    progress.json      trainer   how far it has come, for heartbeats; may be lost
    profile.json       command   asks the trainer for a trace of its next steps; taken once
    profiled.json      trainer   what became of the trace that was asked for last
    checkpoint         trainer   see `resume`
    slow               chaos     how many times as long a step takes; there only while it does
    lock, trainer.lock           one agent and one trainer at a time
    trainer.json       trainer   who holds trainer.lock, for the next agent
    *.fifo                       FIFOs, see `trainer/parent_watch.py`

Files are the truth. The pipes between the two processes only wake: what was missed is
still there. Every file is replaced by a rename, so a reader sees the old or the new
content, never half of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.system.files import keep_bytes
from diloco_cli.system.locks import Busy, FileLock
from diloco_cli.wire.frame import Frame, open_frame
from diloco_cli.wire.messages import Amendments, LaneAssignment, News, TrainerProgress

TRAINER_LOCK = "trainer.lock"
SLOW = "slow"
FINISHED = "the run is finished"
"""Why a trainer leaves at the end of the run, in its last report after `stopped: `."""
STARTING = "before its first step"
"""What a trainer that is not ours reports until it has made one."""
MAIL = ("outbox", "image", "fate")
CLEAR_SECONDS = 60.0
"""For a trainer that was sent away to write its last checkpoint."""

Stamp = tuple[int, int, int]
"""Changes whenever a file is replaced: inode, time, size."""


@dataclass(frozen=True, slots=True)
class FolderOwner:
    """Who speaks for the region from this folder."""

    owner: str
    boot: int
    run: str = ""
    """Empty until the first join."""
    high: int = -1
    """Largest clock the server had decided for the region at the last join."""
    key: str = ""
    """Shown at every join: where anybody may join, the name belongs to whoever has it."""
    region: str = ""
    """The region it spoke for when an agent was last started on it."""
    renamed: bool = False
    """It had another owner id once: what it holds without a checkpoint was made under that."""
    was: tuple[str, ...] = ()
    """Runs that `run` continues after a loss of the server's disk, oldest first."""


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Everything a trainer that is not ours needs is in the folder."""

    agent: int
    """The agent's process."""
    terms: int
    """Number of the terms that spec.yaml is of."""
    cores: tuple[int, ...] = ()
    """Those it should keep to; all if there are none."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What the server said about one frame."""

    digest: str
    fate: str
    why: str = ""
    forgotten: bool = False
    """The server has nothing of this region on record any more."""


@dataclass(frozen=True)
class Image:
    """One fragment as published: the only weights a trainer ever adopts."""

    version: int
    merged: Mapping[str, str]
    """Digest of each region's last merged frame, as of this version."""
    published: str
    """Digest of the weights."""
    weights: np.ndarray = field(repr=False)
    run: str = ""
    counted: Mapping[str, float] = field(default_factory=dict)
    """Tokens merged and counted by about then, by region."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Asks a trainer for a trace of its next steps."""

    id: str
    steps: int
    folder: str
    """Where the trace goes; absolute."""


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """What became of a trace."""

    id: str
    steps: int
    """How many are in it; fewer than were asked for if the trainer left meanwhile."""
    error: str = ""


class Mailbox:
    """One region's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint.safetensors"
        self.checkpoints = folder / "checkpoints"
        self.average_file = folder / "ema.safetensors"
        self.calls_file = folder / "calls.json"
        self.lanes_file = folder / "lanes.json"
        self.progress_file = folder / "progress.json"
        self.profile_file = folder / "profile.json"
        self.profiled_file = folder / "profiled.json"
        self.terms_file = folder / "terms.json"
        self.spec_file = folder / "spec.yaml"
        self.trainer_file = folder / "trainer.json"
        self.ready_file = folder / "ready.json"
        self.trainer_fifo, self.agent_fifo = folder / "trainer.fifo", folder / "agent.fifo"
        self._held: int | None = None
        """Inode of the agent's lock, while we hold it."""

    def prepare(self) -> None:
        """Makes the folders."""
        try:
            for name in MAIL:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.folder} cannot be made: {error.strerror}.",
                hint="Fix the permissions, or choose another folder with --dir.",
            ) from None

        for fifo in (self.trainer_fifo, self.agent_fifo):
            # Where there are no FIFOs, a trainer that loses its agent leaves.
            with contextlib.suppress(OSError):
                os.mkfifo(fifo, 0o600)

    def gone(self) -> str:
        """Says that the folder which we hold was deleted or replaced; empty while it was not."""
        found = stamp(self.folder / "lock")
        if self._held is None or (found is not None and found[0] == self._held):
            return ""
        return (
            f"{self.folder} was deleted at about {time.strftime('%H:%M:%S')}; what it held and the "
            "run has not merged is lost"
        )

    def check_there(self) -> None:
        """Raises once the folder that we hold was deleted or replaced."""
        if gone := self.gone():
            raise StoreError(f"{gone}.")

    def newest_clock(self, fragments: int) -> int:
        """The newest clock that this folder has put on a frame; −1 if none can be read."""
        frames = []
        with contextlib.suppress(DilocoError):
            frames = [self.frame(number) for number in range(fragments)]
        return max((frame.header.clock for frame in frames if frame), default=-1)

    def remove_fifos(self) -> None:
        """A folder where nobody works holds files only; call it under the lock."""
        _remove((self.trainer_fifo, self.agent_fifo, self.ready_file))

    def clear_agent_drafts(self) -> None:
        """Removes what an agent that died left half written; call it under the lock."""
        for name in (
            "identity.json",
            "calls.json",
            "lanes.json",
            "terms.json",
            "spec.yaml",
            "ready.json",
        ):
            _remove(self.folder.glob(f".{name}.*.draft"))
        _remove(self.folder.glob(f"{self.average_file.name}*"))
        for folder in ("image", "fate"):
            _remove((self.folder / folder).glob(".*"))

    def clear_trainer_drafts(self) -> None:
        """Removes what a trainer that died left half written; call it under its lock."""
        for pattern in (
            ".progress.json.*.draft",
            ".trainer.json.*.draft",
            ".profiled.json.*.draft",
            ".checkpoint*",
            "checkpoint*.draft",
            ".tmp*",
        ):
            _remove(self.folder.glob(pattern))
        _remove((self.folder / "outbox").glob(".*"))

    def clear(self) -> None:
        """Removes all that was of a run, but not who the folder is; call it under the lock."""
        with self.locked(TRAINER_LOCK, seconds=CLEAR_SECONDS):
            lasting = {"lock", TRAINER_LOCK, "identity.json", SLOW}
            lasting |= {self.trainer_fifo.name, self.agent_fifo.name}
            mail = [path for name in MAIL for path in (self.folder / name).iterdir()]
            own = [path for path in self.folder.iterdir() if path.name not in lasting]
            for path in [*mail, *(path for path in own if not path.is_dir())]:
                path.unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def clear_outbox(self) -> None:
        """Removes what was posted; call it under the lock."""
        with self.locked(TRAINER_LOCK, seconds=CLEAR_SECONDS):
            _remove((self.folder / "outbox").iterdir())

    def forget_news(self) -> None:
        """Removes what may be lost at any time: reports, news and answers."""
        _remove((self.progress_file, self.calls_file, *(self.folder / "fate").iterdir()))

    def outbox_file(self, fragment: int) -> Path:
        return self.folder / "outbox" / f"{fragment}.frame"

    def image_file(self, fragment: int) -> Path:
        return self.folder / "image" / f"{fragment}.safetensors"

    def fate_file(self, fragment: int) -> Path:
        return self.folder / "fate" / f"{fragment}.json"

    def identity(self) -> FolderOwner | None:
        found = _read_json(self.folder / "identity.json")
        if found is None:
            return None
        try:
            return FolderOwner(**{**found, "was": tuple(found.get("was", ()))})
        except TypeError:
            raise StoreError(
                f"{self.folder / 'identity.json'} is damaged: {found}.",
                hint="Delete it; the region then takes a new identity.",
            ) from None

    def write_identity(self, identity: FolderOwner) -> None:
        path = self.folder / "identity.json"
        try:
            keep_bytes(path, _json(asdict(identity)))
        except OSError as error:
            raise _unusable(path, error) from None

    def post(self, fragment: int, frame: bytes) -> None:
        """Makes a frame durable, then visible; it replaces the fragment's last one."""
        keep_bytes(self.outbox_file(fragment), frame)

    def frame(self, fragment: int, *, size: int | None = None) -> Frame | None:
        """Opens the fragment's newest frame; WireError if its bytes cannot be trusted."""
        try:
            data = self.outbox_file(fragment).read_bytes()
        except FileNotFoundError:
            return None
        return open_frame(data, size=size)

    def write_image(self, fragment: int, image: Image) -> None:
        notes = {
            "version": str(image.version),
            "merged": json.dumps(dict(image.merged), sort_keys=True),
            "published": image.published,
            "run": image.run,
            "counted": json.dumps(dict(image.counted), sort_keys=True),
        }
        data = save({"weights": image.weights}, metadata=notes)
        # Not flushed: what a power cut spoils, its digest shows, and the server has it still.
        keep_bytes(self.image_file(fragment), data, durable=False)

    def image(self, fragment: int) -> Image | None:
        """Reads the newest published weights of a fragment; None before the first."""
        path = self.image_file(fragment)
        try:
            with safe_open(path, framework="np") as file:
                notes = file.metadata() or {}
                weights = file.get_tensor("weights")
            return Image(
                int(notes["version"]),
                json.loads(notes["merged"]),
                notes["published"],
                weights,
                notes["run"],
                json.loads(notes["counted"]),
            )
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise StoreError(
                f"The image {path} cannot be read: {error}.",
                hint="Delete it; the region then fetches it again.",
            ) from None

    def take_average(self) -> tuple[tuple[int, ...], dict[str, np.ndarray]] | None:
        """Gives the average that lies here and its versions, once; None for none."""
        if stamp(self.average_file) is None:
            return None
        try:
            with safe_open(self.average_file, framework="np") as file:
                versions = tuple(json.loads((file.metadata() or {})["versions"]))
                names = list(file.keys())
                return versions, {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError, KeyError, ValueError):
            return None  # It is fetched again beside the next evaluation.
        finally:
            _remove((self.average_file,))

    def image_version(self, fragment: int) -> int:
        """Says which version is here without reading the weights; −1 for none or a damaged one.

        Nor does one count that is of a run which this folder's continues.
        """
        return self.image_name(fragment)[0]

    def image_name(self, fragment: int) -> tuple[int, str]:
        """Version and published digest of what is here, without reading the weights."""
        try:
            with safe_open(self.image_file(fragment), framework="np") as file:
                notes = file.metadata() or {}
            identity = self.identity()
            if identity and notes["run"] in identity.was:
                return -1, ""
            return int(notes["version"]), notes["published"]
        except (SafetensorError, OSError, KeyError, ValueError):
            return -1, ""

    def fate(self, fragment: int) -> Fate | None:
        found = _read_json(self.fate_file(fragment))
        return Fate(**found) if found else None

    def write_fate(self, fragment: int, fate: Fate) -> None:
        keep_bytes(self.fate_file(fragment), _json(asdict(fate)), durable=False)

    def calls(self) -> News | None:
        """Reads the newest news; None before the first."""
        try:
            return News.model_validate_json(self.calls_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write_calls(self, news: News) -> None:
        keep_bytes(self.calls_file, news.body(), durable=False)

    def terms(self) -> Amendments:
        """Reads the amendments that the region has heard of; none before the first."""
        try:
            return Amendments.model_validate_json(self.terms_file.read_bytes())
        except FileNotFoundError:
            return Amendments(terms=0, amendments=())
        except ValidationError as error:
            raise StoreError(
                f"{self.terms_file} is damaged: {error.errors()[0]['msg']}.",
                hint="Delete it; the region learns them again from the server.",
            ) from None

    def write_terms(self, terms: Amendments) -> None:
        keep_bytes(self.terms_file, terms.body())

    def write_spec(self, text: str) -> None:
        keep_bytes(self.spec_file, text.encode())

    def ready(self) -> AgentReady | None:
        """Says whether an agent is here and a trainer may join; None while it may not."""
        found = _read_json(self.ready_file)
        if found is None or FileLock(self.folder / "lock").holder() != str(found.get("agent")):
            return None
        return AgentReady(found["agent"], found["terms"], tuple(found["cores"]))

    def write_ready(self, ready: AgentReady) -> None:
        keep_bytes(self.ready_file, _json(asdict(ready)), durable=False)

    def withdraw_ready(self) -> None:
        """Lets no trainer join until the agent is ready again."""
        _remove((self.ready_file,))

    def lanes(self) -> LaneAssignment | None:
        """Reads which lanes of the text are this region's; None before the first."""
        try:
            return LaneAssignment.model_validate_json(self.lanes_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StoreError(
                f"{self.lanes_file} is damaged: {error.errors()[0]['msg']}.",
                hint="Delete it; the region asks the server again.",
            ) from None

    def write_lanes(self, lanes: LaneAssignment) -> None:
        keep_bytes(self.lanes_file, lanes.body())

    def progress(self) -> TrainerProgress | None:
        """Reads the trainer's newest report; None before the first."""
        try:
            return TrainerProgress.model_validate_json(self.progress_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def unmerged(self, sizes: Sequence[int]) -> float:
        """Tokens that this region has trained and that are in no version it knows of."""
        progress = self.progress()
        if progress is None:
            return 0.0
        pending = zip(sizes, progress.tokens.pending, strict=True)
        return max(0.0, sum(size * tokens for size, tokens in pending) / sum(sizes))

    def left_at_the_end(self) -> bool:
        """Says whether the trainer left because the run was finished, which it may no longer be."""
        progress = self.progress()
        return progress is not None and progress.why == f"stopped: {FINISHED}"

    def write_progress(self, progress: TrainerProgress) -> None:
        data = _json(progress.model_dump(mode="json"))
        keep_bytes(self.progress_file, data, durable=False)

    def ask_for_profile(self, request: ProfileRequest) -> None:
        keep_bytes(self.profile_file, _json(asdict(request)), durable=False)

    def withdraw_profile(self) -> None:
        """Asks no more; a trace that was begun is finished all the same."""
        self.profile_file.unlink(missing_ok=True)

    def take_profile_request(self) -> ProfileRequest | None:
        """Takes what is asked for, so that nobody else answers it; None for nothing."""
        found = _read_json(self.profile_file)
        self.withdraw_profile()
        with contextlib.suppress(TypeError):
            return ProfileRequest(**found) if found else None
        return None

    def answer_profile(self, answer: ProfileAnswer) -> None:
        keep_bytes(self.profiled_file, _json(asdict(answer)), durable=False)

    def profile_answer(self) -> ProfileAnswer | None:
        found = _read_json(self.profiled_file)
        return ProfileAnswer(**found) if found else None

    def trainer_lock_holder(self) -> int | None:
        """Says which process trains here; None when there is none."""
        pid = FileLock(self.folder / TRAINER_LOCK).holder()
        return int(pid) if pid and pid.isdigit() else None

    @contextlib.contextmanager
    def locked(self, name: str = "lock", *, seconds: float = 0.0) -> Iterator[None]:
        """Holds the folder; a second holder waits `seconds`, then is told who the first one is."""
        lock = FileLock(self.folder / name)
        try:
            lock.acquire(wait=seconds)
        except Busy as busy:
            raise SpecError(
                f"{self.folder} is in use by another process, pid {busy.pid}.",
                hint="One worker per region folder: stop that one, or give this one another --dir.",
            ) from None
        except OSError as error:
            raise _unusable(lock.path, error) from None
        mine = stamp(lock.path) if name == "lock" else None
        self._held = mine[0] if mine else self._held
        try:
            yield
        finally:
            lock.release()


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written: {error.strerror}.",
        hint="Make room or fix the permissions, or choose another folder with --dir.",
    )


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def stamp(path: Path) -> Stamp | None:
    """Says whether a file was replaced since, without reading it; None while there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        # Not durable means that a power cut may leave an empty file behind a rename.
        if path.name != "identity.json":
            return None
        raise StoreError(
            f"{path} is damaged: {error}.", hint="Delete it; the region takes a new identity."
        ) from None
    return found if isinstance(found, dict) else None
