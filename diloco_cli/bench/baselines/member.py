"""One region of a data-parallel job: a process that computes gradients and moves by their mean.

    python -m diloco_cli.bench.baselines.member SPEC --region paris --reducer 127.0.0.1:4000 …

Model, text, optimiser and evaluation are those of the trainer. The reducer tells what to do;
every member that starts a step from the same weights ends it with the same weights, bit for
bit, because all of them move by the very same bytes.

What a member reads in step `n` follows from `n` alone, so nobody has to remember where it
was: a step that is repeated reads the same text, and what a dead member would have read
is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from safetensors.numpy import load_file, save_file

from diloco_cli.assemble import load_run
from diloco_cli.bench.baselines.messages import (
    GRADIENT,
    STATE,
    MessageHead,
    MessageSocket,
    Words,
    chunks,
)
from diloco_cli.core.lanes import Cursor
from diloco_cli.errors import DilocoError
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.files import keep_files
from diloco_cli.worker.engines.jax_engine import JaxStep
from diloco_cli.worker.trainer.checkpoints import checkpoint
from diloco_cli.worker.trainer.checkpoints.checkpoint import Checkpoint
from diloco_cli.worker.trainer.task import Task, prepare, set_up

TYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
CONNECT_SECONDS = 30.0


class Halves:
    """A step in two halves, with the gradient as one vector in between."""

    def __init__(self, task: Task, kind: str) -> None:
        step = cast(JaxStep, task.step)
        like = {name: jnp.zeros(shape) for name, shape in step.placement.shapes.items()}
        flat, apart = ravel_pytree(like)
        self.kind = np.dtype(TYPES[kind])
        self.bytes = flat.size * self.kind.itemsize

        def slope(params: Any, tokens: Any) -> tuple[jax.Array, jax.Array]:
            loss, gradient = step.gradient(params, tokens)
            return loss, ravel_pytree(gradient)[0].astype(self.kind)

        def move(params: Any, state: Any, loss: jax.Array, vector: jax.Array) -> Any:
            return step.move(params, state, loss, apart(vector.astype(jnp.float32)))

        self.slope, self.move = jax.jit(slope), jax.jit(move, donate_argnums=(0, 1))


class ParallelMember:
    def __init__(
        self, task: Task, halves: Halves, line: MessageSocket, files: Path, pace: float
    ) -> None:
        self.task, self.halves, self.line, self.files = task, halves, line, files
        self.compiled = cast(JaxStep, task.step)
        self.placement = self.compiled.placement
        self.pace, self.factor, self.due = pace, 1.0, 0.0
        self.step = self.attempt = 0
        self.params: Any = None
        self.state: Any = None
        self.mean = np.empty(halves.bytes, np.uint8)
        self.sent: memoryview = memoryview(b"")
        self.loss = 0.0
        self.arrived = bytearray()
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="sender")
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.saving: Future[None] | None = None
        self.doing: dict[str, Callable[[Words], None]] = {
            **{"load": self.load, "give": self.give, "take": self.take, "go": self.go},
            **{"again": self.again, "done": self.done, "pace": self.set_pace},
        }

    def run(self) -> None:
        """Does what the reducer says until it says stop."""
        while True:
            head = self.line.head()
            if head.kind == GRADIENT:
                self.line.chunk(head, self.mean.data)
            elif head.kind == STATE:
                self.line.chunk(head, memoryview(self.arrived))
            else:
                words = self.line.words(head)
                if words["do"] == "stop":
                    return self.stop(first=words["first"])
                self.doing[words["do"]](words)

    def load(self, words: Words) -> None:
        """Begins at the last checkpoint, or at the first weights where there is none."""
        began = time.monotonic()
        if self.checkpoint.exists():
            saved = checkpoint.load(self.checkpoint)
            self.params = self.placement.place(saved.params)
            self.state = self.compiled.restore_state(saved.opt_state)
            self.step = saved.step
        else:
            self.params = self.placement.place(self.task.model.init(self.task.spec.seed))
            self.step = 0
            self.state = self.compiled.init_state(self.params)
        self.line.say(loaded=self.step, seconds=time.monotonic() - began)

    def give(self, words: Words) -> None:
        """Sends everything a member needs that joins here."""
        for at, part in chunks(memoryview(self.holdings())):
            self.line.send(MessageHead(STATE, at=at), part)
        self.line.say(given=self.step)

    def take(self, words: Words) -> None:
        """Gets ready for what another member gives, or takes over what has arrived."""
        if not words["arrived"]:
            self.params = self.placement.place(self.task.model.init(self.task.spec.seed))
            self.state = self.compiled.init_state(self.params)
            self.arrived = bytearray(len(self.holdings()))
            return
        data, at = memoryview(self.arrived), 0
        for group in (own := self._groups()):
            for name, values in group.items():
                part = data[at : at + values.nbytes]
                group[name] = np.frombuffer(part, values.dtype).reshape(values.shape)
                at += values.nbytes
        self.params = self.placement.place(own[0])
        self.state = self.compiled.restore_state(own[1])
        self.step, self.arrived = words["step"], bytearray()
        self.line.say(loaded=self.step)

    def holdings(self) -> bytes:
        return b"".join(values.tobytes() for group in self._groups() for values in group.values())

    def _groups(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Weights and optimiser on the host, in an order that does not depend on their past."""
        weights, state = self.placement.fetch(self.params), self.placement.flatten(self.state)
        return dict(sorted(weights.items())), dict(sorted(state.items()))

    def go(self, words: Words) -> None:
        """Computes this step's gradient and sends it, no sooner than the pace allows."""
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.due = time.monotonic() + self.pace * self.factor
        windows = self.step * self.task.inner.batch
        tokens, _ = self.task.stream.batch(self.task.stream.start(windows))
        loss, vector = self.halves.slope(self.params, tokens)
        self.loss = float(loss)
        self.sent = np.asarray(vector).view(np.uint8).data
        self.again({"attempt": 0})

    def again(self, words: Words) -> None:
        """Sends the gradient of the step, once more if somebody died meanwhile."""
        self.attempt = words["attempt"]
        self.sender.submit(self._send, self.step, self.attempt, self.sent, self.loss)

    def _send(self, step: int, attempt: int, data: memoryview, loss: float) -> None:
        with contextlib.suppress(OSError):  # Whoever receives hears of it too.
            for at, part in chunks(data):
                if (step, attempt) != (self.step, self.attempt):
                    return
                self.line.send(MessageHead(GRADIENT, step, attempt, at), part)
            self.line.say(sent=step, attempt=attempt, loss=loss)

    def done(self, words: Words) -> None:
        """Moves by the mean of all."""
        vector = jnp.array(self.mean.view(self.halves.kind), copy=True).block_until_ready()
        loss = jnp.float32(words["loss"])
        self.params, self.state, _ = self.halves.move(self.params, self.state, loss, vector)
        self.step += 1
        if words["save"]:
            self.save()
        if words["snapshot"] is not None:
            self.snapshot(words["snapshot"])
        if words["then"] == "go":
            self.go(words)

    def set_pace(self, words: Words) -> None:
        self.factor = words["factor"]

    @property
    def checkpoint(self) -> Path:
        return self.files / "checkpoint.safetensors"

    def save(self) -> None:
        """Copies a checkpoint and lets the disk have it; says what that held up and took."""
        if self.saving:
            if not self.saving.done():
                return
            self.saving.result()  # A disk that refused ends us, and with it the run.
        began = time.monotonic()
        copied = self._copied()
        blocked = time.monotonic() - began

        def write() -> None:
            checkpoint.save(self.checkpoint, copied)
            took = time.monotonic() - began
            self.line.say(saved=copied.step, blocked=blocked, took=took)

        self.saving = self.disk.submit(write)

    def _copied(self) -> Checkpoint:
        return Checkpoint(
            params=self.placement.fetch(self.params),
            opt_state=self.placement.flatten(self.state),
            anchors=[],
            books=[],
            cursor=Cursor(),
            clock=self.step,
            step=self.step,
        )

    def snapshot(self, number: int) -> None:
        """Keeps weights that are evaluated after the run, so that nobody waits for it now."""
        weights = self.placement.fetch(self.params)
        path = self.files / "curve" / f"{number:05d}.safetensors"
        self.disk.submit(keep_files, {path: lambda draft: save_file(weights, draft)}, durable=False)

    def stop(self, *, first: bool) -> None:
        self.attempt = -1  # Ends the sender.
        digest = hashlib.sha256(self.holdings()).hexdigest()
        answer: Words = {"stopped": self.step, "digest": digest}
        if first:
            self.disk.shutdown(wait=True)
            checkpoint.save(self.checkpoint, self._copied())
            curve = sorted((self.files / "curve").glob("*.safetensors"))
            answer["heldout"] = self.evaluate(self.placement.fetch(self.params))
            answer["curve"] = {int(path.stem): self.evaluate(load_file(path)) for path in curve}
        self.line.say(**answer)

    def evaluate(self, weights: dict[str, np.ndarray]) -> float:
        batches = self.task.stream.heldout(self.task.spec.evaluate.batches)
        return self.compiled.evaluate(self.placement.place(weights), batches)


def warm(task: Task, halves: Halves) -> None:
    """Compiles both halves by one step that leaves no trace."""
    step = cast(JaxStep, task.step)
    params = step.placement.place(task.model.init(task.spec.seed))
    tokens, _ = task.stream.batch(task.stream.start())
    loss, vector = halves.slope(params, tokens)
    _, _, loss = halves.move(params, step.init_state(params), loss, vector)
    loss.block_until_ready()
    gc.collect()
    gc.freeze()


def place_of(spec: RunSpec, region: str) -> tuple[int, int]:
    """Says which of how many members with the same text a region is."""
    data = spec.data_of(region)
    together = [other.name for other in spec.regions if spec.data_of(other.name) == data]
    return together.index(region), len(together)


def main() -> int:
    options = _arguments()
    _end_with_parent()
    set_up([int(core) for core in options.cores.split(",") if core])
    try:
        task = prepare(load_run(options.spec).spec, options.region)
        task = replace(task, stream=task.stream.part(*place_of(task.spec, options.region)))
        halves = Halves(task, options.gradients)
        started = time.monotonic()
        warm(task, halves)
        compiled = time.monotonic()
        host, port = options.reducer.rsplit(":", 1)
        end = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        end.settimeout(None)
        line = MessageSocket(end)
        line.say(
            **{"hello": options.region, "boot": options.boot, "pid": os.getpid()},
            **{"bytes": halves.bytes},
            # The clock is the machine's, so what our parent read from it can be compared.
            **{"start": started - options.born, "compile": compiled - started},
        )
        member = ParallelMember(task, halves, line, options.files, options.pace)
        member.factor = options.factor
        member.run()
    except (DilocoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, DilocoError) else 4
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="member")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--files", type=Path, required=True)
    for name in ("--region", "--reducer", "--cores", "--gradients"):
        parser.add_argument(name, required=True)
    for name in ("--pace", "--factor", "--born"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--boot", type=int, required=True)
    return parser.parse_args()


def _end_with_parent() -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Sockets and threads that still wait for somebody must not hold the end up.
    os._exit(code)
