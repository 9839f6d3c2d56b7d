"""Real pseudo-gradients to measure codecs on: a few rounds of the quickstart, in this process.

Two regions train in turns; each keeps what its codec left out, as the protocol has it, and
the server's side is the real outer step. The last round's vectors are the sample: early
training, but past the first jumps.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from diloco_cli.assemble import load_run, resolve, spelled_out
from diloco_cli.core.fragments import Fragment, gather, scatter
from diloco_cli.merge.protocols import OuterRound, optimizer_at
from diloco_cli.merge.rules import merge, weight
from diloco_cli.run.scaffold import TEMPLATES
from diloco_cli.wire.codecs import Codec
from diloco_cli.worker.trainer.task import Task, prepare


def quickstart_round(rounds: int = 6) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gives the vectors that go up, and those that go down, in the last of some rounds."""
    with resources.as_file(TEMPLATES / "pipelines" / "quickstart.yaml") as path:
        spec = spelled_out(load_run(path).spec)
    parts = resolve(spec)
    regions = [_Region(prepare(spec, region.name), parts.up) for region in spec.regions]
    published = regions[0].task.model.init(spec.seed)
    theta = [gather(published, each) for each in parts.layout.fragments]
    momentum = [parts.outer.start(vector.size) for vector in theta]
    steps, tokens = spec.sync.every, spec.sync.every * regions[0].task.tokens
    counted = weight(float(tokens), float(steps), steps_cap=float(10 * steps))
    up: list[np.ndarray] = []
    down: list[np.ndarray] = []
    for version in range(1, rounds + 1):
        sent = [region.train(published, steps) for region in regions]
        up, down = [delta for deltas, _ in sent for delta in deltas], []
        for number, fragment in enumerate(parts.layout.fragments):
            members = [(counted, decoded[number]) for _, decoded in sent]
            merged = merge(parts.merge, fragment, members)
            theta[number], momentum[number] = optimizer_at(parts.outer, OuterRound(version)).step(
                theta[number], momentum[number], merged, drain=False
            )
            down.append(theta[number] - gather(published, fragment))
            _add(parts.down, down[-1], fragment, published)
    return up, down


def _add(
    codec: Codec, change: np.ndarray, fragment: Fragment, weights: dict[str, np.ndarray]
) -> None:
    received = codec.decode(codec.encode(change), change.size)
    scatter(gather(weights, fragment) + received, fragment, weights)


class _Region:
    def __init__(self, task: Task, up: Codec) -> None:
        self.task, self.up = task, up
        self.cursor = task.stream.start()
        self.engine = task.step.engine()
        self.engine.load(task.model.init(task.spec.seed), None)
        self.held = [np.zeros(each.size, np.float32) for each in task.layout.fragments]

    def train(
        self, published: dict[str, np.ndarray], steps: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Trains from the published weights less what is held; gives deltas, and as decoded."""
        fragments = self.task.layout.fragments
        for fragment, held in zip(fragments, self.held, strict=True):
            self.engine.write(fragment, gather(published, fragment) - held)
        for _ in range(steps):
            tokens, self.cursor = self.task.stream.batch(self.cursor)
            self.engine.step(tokens)
        deltas = [gather(published, part) - self.engine.read(part) for part in fragments]
        decoded = [self.up.decode(self.up.encode(delta), delta.size) for delta in deltas]
        self.held = [delta - back for delta, back in zip(deltas, decoded, strict=True)]
        return deltas, decoded
