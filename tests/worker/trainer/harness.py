"""A trainer on a stage: the test plays its agent and its server, file by file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import cut, gather
from diloco_cli.models import models
from diloco_cli.observe.events import EventLog
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame
from diloco_cli.wire.messages import LaneAssignment, News
from diloco_cli.worker.agent.join import order_of
from diloco_cli.worker.mailbox import Fate, FolderOwner, Image, Mailbox

RUN = "run-1"
TEXT = b"".join(b"%d bottles of beer on the wall, take one down. " % n for n in range(4000))


def tiny_spec(folder: Path, **sync: Any) -> RunSpec:
    """A run so small that a step takes a millisecond."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    return RunSpec.model_validate(
        {
            "spec": 1,
            "name": "tiny",
            "budget": {"tokens": 1_000_000},
            "model": {"kind": "decoder", "layers": 1, "width": 16, "heads": 2},
            "data": {"kind": "text", "files": [str(text)]},
            "inner": {"batch": 2, "sequence": 16, "schedule": {"kind": "constant"}},
            "regions": [{"name": "paris"}],
            "sync": {"fragments": 2, "every": 4, "overlap": 1, **sync},
            "evaluate": {"batches": 2},
        }
    )


class Stage:
    """The agent's and the server's side of one region's mailbox."""

    def __init__(self, folder: Path, spec: RunSpec, region: str = "paris") -> None:
        self.folder, self.spec, self.region = folder, spec, region
        self.mailbox = Mailbox(folder / "regions" / region)
        self.mailbox.prepare()
        model = models.build(spec.model)
        self.layout = cut(model.tensors(), spec.sync.fragments)
        weights = model.init(spec.seed)
        self.published = [gather(weights, fragment) for fragment in self.layout.fragments]
        self.versions = [0] * spec.sync.fragments
        self.merged: list[dict[str, str]] = [{} for _ in self.versions]
        self.n = 0
        self.mailbox.write_identity(FolderOwner("owner", 1, RUN))
        for number in range(len(self.versions)):
            self.publish(number)
        self.read()
        self.grant(range(self.order.lanes))

    def publish(self, number: int) -> None:
        weights = self.published[number]
        image = Image(self.versions[number], self.merged[number], vector_digest(weights), weights)
        self.mailbox.write_image(number, image)

    def merge(self, number: int, by: str | None = None) -> np.ndarray:
        """Publishes the next version out of the frame in the outbox, as a server would."""
        frame = self.frame(number)
        values = frame.values()
        self.published[number] = self.published[number] - values
        self.versions[number] += 1
        self.merged[number] = {self.region: by or frame.digest}
        self.publish(number)
        return values

    def move_on(self, number: int) -> None:
        """Publishes a version made by others only."""
        self.published[number] = self.published[number] + np.float32(0.125)
        self.versions[number] += 1
        self.publish(number)

    def tell(self, calls: Mapping[int, int] | None = None, **flags: Any) -> None:
        self.n += 1
        quiet = {"end": False, "finished": False, "stop": False, "evaluate": False}
        news = News.model_validate(
            {
                "n": self.n,
                "versions": self.versions,
                "calls": calls or {},
                "fates": {},
                "lease_seconds": 10.0,
                **quiet,
                **flags,
            }
        )
        self.mailbox.write_calls(news)

    def read(self) -> None:
        """Looks at the text of the spec, as an agent does before it joins."""
        order = order_of(self.spec, self.region)
        assert order is not None
        self.order = order

    def grant(self, lanes: Iterable[int], *asked: int, grant: int = 1, at: int = 0) -> None:
        """Says which lanes the region reads."""
        told = {
            "order": self.order.digest,
            "count": self.order.lanes,
            "lanes": {lane: (grant, at) for lane in lanes},
            "asked": asked,
        }
        self.mailbox.write_lanes(LaneAssignment.model_validate(told))

    def decide(self, number: int, fate: str, why: str = "") -> None:
        self.mailbox.write_fate(number, Fate(self.frame(number).digest, fate, why))

    def frame(self, number: int) -> Frame:
        frame = self.mailbox.frame(number)
        assert frame is not None, f"nothing was posted of fragment {number}"
        return frame

    def trainer(self, task: Any = None) -> Any:
        """Starts a trainer in this process; JAX is loaded here."""
        from diloco_cli.worker.trainer.built_in_trainer import Trainer
        from diloco_cli.worker.trainer.task import prepare

        return Trainer(
            task or prepare(self.spec, self.region),
            self.mailbox,
            Wakeup(),
            tell=lambda word: None,
            events=EventLog(self.folder / "events.jsonl", "paris.trainer"),
        )


def until(trainer: Any, happened: Callable[[], bool], seconds: float = 30.0) -> None:
    """Passes step boundaries, without steps, until something has happened."""
    deadline = time.monotonic() + seconds
    while True:
        trainer.wakeup.wake()
        trainer.boundary()
        if happened():
            return
        assert time.monotonic() < deadline, "it did not happen"
        trainer.wakeup.wait(0.02)


def posted(trainer: Any, number: int) -> bool:
    """Says whether the fragment's frame is durable and the trainer knows it."""
    flight = trainer.weights.books[number].flight
    return flight is not None and flight.digest != ""


def honest(trainer: Any) -> bool:
    """Says whether every trained token has a fate."""
    return all(abs(unmerged_work.account(book)) < 1e-6 for book in trainer.weights.books)


def local(trainer: Any, number: int) -> np.ndarray:
    """The fragment's weights on the device."""
    return gather(trainer.weights.engine.snapshot().params, trainer.task.layout.fragments[number])


def steps(trainer: Any, count: int) -> None:
    for _ in range(count):
        trainer.boundary()
        trainer.inner_step()


def post(stage: Stage, trainer: Any, number: int) -> None:
    """Calls a fragment and waits until the trainer has answered."""
    stage.tell({number: stage.versions[number]})
    until(trainer, lambda: posted(trainer, number))
    stage.tell()


def again(stage: Stage, trainer: Any) -> Any:
    """Another trainer on the same folder, as after a crash."""
    trainer.close()
    return stage.trainer(trainer.task)


def save(trainer: Any) -> None:
    from diloco_cli.worker.trainer.checkpoints import checkpoint

    trainer.checkpoints.wait()  # Its own may be due, and under way: it would come out on top.
    checkpoint.save(trainer.mailbox.checkpoint, trainer.weights.checkpoint())
