"""A closed round becomes the next version: the same bits on any machine, in bounded memory."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import zstandard

from diloco_cli.core.fragments import Tensor, cut
from diloco_cli.core.rounds import Receipt
from diloco_cli.merge.protocols import OuterRound, optimizer_at
from diloco_cli.merge.rules import Mean, merge
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.next_version import Spoiled, Version, next_version
from diloco_cli.wire.chunks import CHUNK, cores
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Header, open_frame, pack, seal
from tests.server.harness import MemoryPayloads, make_settings, make_spec

NAMES = ("a", "b", "c", *(f"r{number:02}" for number in range(48)))
TENSORS = (Tensor("embed", (500, 400), embedding=True), Tensor("w", (1500, 1200)))


def settings(**changes: Any) -> ServerSettings:
    made = make_settings(make_spec(NAMES, **changes))
    return replace(made, layout=cut(TENSORS, 1))


def contribution(run: ServerSettings, region: str, seed: int) -> bytes:
    fragment = run.layout.fragments[0]
    values = np.random.default_rng(seed).normal(scale=1e-3, size=fragment.size)
    header = Header.contribution(
        run="replay",
        layout=run.layout.digest,
        fragment=0,
        size=fragment.size,
        codec=run.spec.wire.up,
        base=0,
        region=region,
        tokens=100.0 + seed,
        steps=3.0,
    )
    return pack(header, values.astype(np.float32))


def beginning(run: ServerSettings) -> Version:
    size = run.layout.fragments[0].size
    theta = np.random.default_rng(99).normal(size=size).astype(np.float32)
    state = StoredState(theta, run.outer.start(size), theta)
    return Version(0, state, vector_digest(theta), {}, ())


def receipts(frames: list[bytes]) -> list[Receipt]:
    return [
        Receipt(
            region=header.region,
            fragment=0,
            base=0,
            clock=0,
            digest=frame.digest,
            prev="",
            tokens=header.tokens,
            steps=header.steps,
            bytes=frame.data.nbytes,
        )
        for frame in map(open_frame, frames)
        if (header := frame.header)
    ]


def merged(run: ServerSettings, frames: list[bytes], *, drain: bool = False) -> Any:
    store, fragment = MemoryPayloads(frames), run.layout.fragments[0]
    return next_version(run, store, beginning(run), fragment, receipts(frames), drain=drain)


@pytest.mark.skipif(cores() < 2, reason="one core is all there is")
@pytest.mark.parametrize("kind", ["radial", "mean"])
def test_the_number_of_cores_changes_no_bit(kind):
    run = settings(merge={"kind": kind})
    frames = [contribution(run, name, seed) for seed, name in enumerate(("a", "b", "c"))]
    assert run.layout.fragments[0].size > CHUNK
    version, delta = merged(run, frames)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
        alone, same = merged(run, frames)
    finally:
        os.sched_setaffinity(0, allowed)
    assert (version.state.digest, delta) == (alone.state.digest, same)


def test_the_delta_leads_to_what_is_published():
    run = settings()
    version, delta = merged(run, [contribution(run, name, 1) for name in ("a", "b")])
    frame = open_frame(delta, size=run.layout.fragments[0].size)
    received = beginning(run).state.published + frame.values()
    assert vector_digest(received) == version.digest == frame.header.published
    assert vector_digest(version.state.published) == version.digest


def test_what_no_encoder_writes_goes_back_to_its_region_alone():
    run = settings()
    frames = [contribution(run, name, seed) for seed, name in enumerate(("a", "b", "c"))]
    sound = open_frame(frames[1])

    squeeze = zstandard.ZstdCompressor(1, write_checksum=True, write_content_size=True).compress
    bodies = [sound.body(place) for place in range(len(sound.lengths))]
    bodies[1] = b"\x88" * len(bodies[1])  # The one code that no int4 encoder writes.
    frames[1] = seal(sound.header, [squeeze(body) for body in bodies])
    spoiled = merged(run, frames)
    assert isinstance(spoiled, Spoiled)
    assert (spoiled.regions, spoiled.fate) == (("b",), "returned")


def test_an_absurd_claim_is_refused_and_names_its_region():
    run = settings()
    frames = [contribution(run, name, 1) for name in ("a", "b")]
    claims = [replace(each, steps=float("nan")) for each in receipts(frames)]
    store, fragment = MemoryPayloads(frames), run.layout.fragments[0]
    spoiled = next_version(run, store, beginning(run), fragment, claims, drain=False)
    assert isinstance(spoiled, Spoiled)
    assert (spoiled.regions, spoiled.fate) == (("a",), "refused")
    assert "steps is nan" in spoiled.why


@dataclass(frozen=True)
class Doubled(Mean):
    """A rule of somebody else."""

    def finish(self, sums: Any) -> np.ndarray:
        return 2 * super().finish(sums)


@pytest.mark.parametrize("drain", [False, True])
def test_a_rule_without_kernels_is_folded_as_it_says(drain):
    run = replace(settings(), merge=Doubled())
    frames = [contribution(run, name, seed) for seed, name in enumerate(("a", "b", "c"))]
    version, _ = merged(run, frames, drain=drain)
    before = beginning(run).state
    weighed = [
        (run.weight(receipt), open_frame(data).values())
        for receipt, data in zip(receipts(frames), frames, strict=True)
    ]
    delta = merge(run.merge, run.layout.fragments[0], weighed)
    outer = optimizer_at(run.outer, OuterRound(1))
    theta, momentum = outer.step(before.theta, before.momentum, delta, drain=drain)
    np.testing.assert_array_equal(version.state.theta, theta)
    np.testing.assert_array_equal(version.state.momentum, momentum)


def test_memory_does_not_grow_with_the_number_of_regions():
    run = settings()
    data = [contribution(run, f"r{seed:02}", seed) for seed in range(48)]
    merged(run, data[:2])  # Compiles, and makes each thread's tools.
    peaks = []
    for count in (36, 48):
        tracemalloc.start()
        merged(run, data[:count])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]


def test_one_that_is_absurdly_long_beside_the_others_leaves_the_round():
    run = settings()
    frames = [contribution(run, name, seed) for seed, name in enumerate(("a", "b", "c"))]
    honest = open_frame(frames[1])
    frames[1] = pack(honest.header, 1000 * honest.values())
    store, fragment = MemoryPayloads(frames), run.layout.fragments[0]
    spoiled = next_version(run, store, beginning(run), fragment, receipts(frames), drain=False)
    assert isinstance(spoiled, Spoiled) and spoiled.regions == ("b",)
    assert spoiled.fate == "refused" and "the round's other members" in spoiled.why
