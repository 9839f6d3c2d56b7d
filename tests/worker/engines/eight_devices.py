"""One model on many meshes, in a process with eight devices; what came out, as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.worker.engines.eight_devices
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco_cli.core.fragments import cut, gather
from diloco_cli.core.unmerged_work import DROP, KEEP, Mix
from diloco_cli.models.attention_flax import splash
from diloco_cli.models.decoder import Decoder
from diloco_cli.models.experts_flax import dense, ragged, routed
from diloco_cli.models.gemma import Gemma4
from diloco_cli.models.transformer import ExpertShape, Transformer
from diloco_cli.spec.schema import InnerSpec, RegionSpec
from diloco_cli.wire.chunks import CHUNK
from diloco_cli.wire.frame import Header, pack
from diloco_cli.worker.engines import EngineSnapshot, mixed
from diloco_cli.worker.engines.device_codec import pack_on_device
from diloco_cli.worker.engines.devices import open_mesh
from diloco_cli.worker.engines.jax_engine import JaxStep, make_step, use_compile_cache
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.orbax_folder import OrbaxFolder
from tests.models.plain_attention import by_hand, queries_keys_values

MODEL = Decoder(
    layers=2, width=32, heads=4, kv_heads=2, ffn=64, vocabulary=104, head=16, tied=False, bias="qkv"
)
LAYOUT = cut(MODEL.tensors(), 5)
"""Tensors in several pieces, pieces that begin and end inside a device's share."""
SOURCE = np.random.default_rng(3)
BATCHES = [SOURCE.integers(0, 104, (8, 17), dtype=np.int32) for _ in range(4)]
SCANNED = {"remat": "block", "loss_chunks": 4}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "fsdp": ({"fsdp": 8}, {}),
    "fsdp × tensor": ({"fsdp": 4, "tensor": 2}, {}),
    "fsdp, scanned": ({"fsdp": 8}, SCANNED),
    "all three, scanned": ({"data": 2, "fsdp": 2, "tensor": 2}, SCANNED),
    "fsdp, micro-batches": ({"fsdp": 4}, {"accumulate": 2}),
    "bfloat16": ({"fsdp": 4, "tensor": 2}, {**SCANNED, "compute": "bfloat16"}),
}


CODECS = [
    {"kind": "int4", "block": 64},
    {"kind": "int8", "block": 32},
    {"kind": "uniform", "block": 64},
    {"kind": "fp32"},
    {"kind": "sparse"},
]
"""One for each fragment; the last two are written on the host."""
MIXES = {"rebase": Mix(1.0, 1.0), "keep": KEEP, "drop": DROP, "blend": Mix(0.5, 0.5)}


OTHERS: dict[str, Transformer] = {
    "gemma4": Gemma4(
        size="tiny",
        layers=2,
        pattern="sf",
        width=32,
        ffn=64,
        vocabulary=104,
        kv_heads=2,
        full_kv_heads=2,
        head=8,
        full_head=16,
        window=5,
        softcap=5.0,
        scalars=(1.25, 0.5),
    ),
    "experts": Decoder(
        layers=2, width=32, heads=4, kv_heads=2, ffn=16, vocabulary=104, experts=4, active=2
    ),
}
"""Layers of two kinds; feed-forwards of which each token takes two."""


def step_on(mesh: dict[str, int], form: dict[str, Any], model: Transformer = MODEL) -> JaxStep:
    region = RegionSpec.model_validate({"name": "paris", "mesh": mesh})
    inner = InnerSpec(batch=8, sequence=16, **form)
    return make_step(model, inner, RatePlan.of(inner, 50), mesh=open_mesh(region))


def other(model: Transformer, name: str) -> dict[str, Any]:
    """Trains a model of another family on one of the meshes."""
    step = step_on(*MESHES[name], model=model)
    engine = step.engine()
    engine.load(model.init(0), None)
    losses = [float(engine.step(batch)) for batch in BATCHES]
    leaves = [*jax.tree.leaves(engine.state), *engine.params.values()]
    most = max(bytes_on(device, leaves) for device in jax.devices())
    return {"losses": losses, "share": most / sum(leaf.nbytes for leaf in leaves)}


def sorted_experts(step: JaxStep) -> float:
    """What accelerators do with experts on a mesh, against what processors do; the difference."""
    source = np.random.default_rng(4)
    x, *matrices = (
        jnp.asarray(source.standard_normal(shape, np.float32))
        for shape in ((16, 6), (3, 6, 4), (3, 6, 4), (3, 4, 6))
    )
    route = routed(jnp.asarray(source.standard_normal((16, 3), np.float32)), ExpertShape(3, 2))
    weights = matrices[0], matrices[1], matrices[2]
    ours = jax.jit(lambda x: ragged(x, route, weights, jax.nn.silu, step.placement.mesh))(x)
    return float(np.abs(np.asarray(ours) - dense(x, route, weights, jax.nn.silu)).max())


def account(step: JaxStep) -> tuple[dict[str, Any], EngineSnapshot]:
    """Trains, with a fragment read and written in between."""
    engine = step.engine()
    engine.load(MODEL.init(0), None)
    losses = []
    for number, batch in enumerate(BATCHES):
        losses.append(float(engine.step(batch)))
        if number == 1:
            for fragment in LAYOUT.fragments:
                engine.write(fragment, engine.read(fragment) * np.float32(1.25))
    snapshot = engine.snapshot()
    leaves = [*jax.tree.leaves(engine.state), *engine.params.values()]
    found = {
        "losses": losses,
        "compilations": step.step._cache_size(),  # pyright: ignore[reportFunctionMemberAccess]
        "reads agree": all(
            np.array_equal(engine.read(fragment), gather(snapshot.params, fragment))
            for fragment in LAYOUT.fragments
        ),
        "share of a device": max(bytes_on(device, leaves) for device in jax.devices())
        / sum(leaf.nbytes for leaf in leaves),
        "heldout": engine.evaluate(snapshot.params, [BATCHES[0], BATCHES[1][:5]]),
        "frames": frames(step),
    }
    return found, snapshot


def bytes_on(device: Any, leaves: list[jax.Array]) -> int:
    shards = (shard for leaf in leaves for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def frames(step: JaxStep) -> list[str]:
    """Frames of the same weights, which must not depend on where they lie; in digests.

    They are begun, then a step moves the weights, then they are written.
    """
    engine, anchors, moved = step.engine(), MODEL.init(0), MODEL.init(1)
    engine.load(moved, None)
    begun = [
        engine.held(each, engine.keep(each, gather(anchors, each)), header(each).codec)
        for each in LAYOUT.fragments
    ]
    engine.step(BATCHES[0])
    written = [
        work.pack(header(each), level=1) for each, work in zip(LAYOUT.fragments, begun, strict=True)
    ]
    return [hashlib.sha256(frame).hexdigest() for frame in written]


def expected_frames() -> list[str]:
    anchors, moved = MODEL.init(0), MODEL.init(1)
    vectors = [gather(anchors, each) - gather(moved, each) for each in LAYOUT.fragments]
    return [
        hashlib.sha256(pack(header(each), vector)).hexdigest()
        for each, vector in zip(LAYOUT.fragments, vectors, strict=True)
    ]


def header(fragment: Any) -> Header:
    return Header.contribution(
        run="run-1",
        layout=LAYOUT.digest,
        fragment=fragment.number,
        size=fragment.size,
        codec=CODECS[fragment.number],
        base=0,
        region="paris",
    )


def adopts(step: JaxStep) -> list[str]:
    """Adopts a version of every fragment in every way; says what came out wrong."""
    engine, anchors, news, sent = step.engine(), MODEL.init(0), MODEL.init(1), MODEL.init(2)
    wrong: list[str] = []
    for fragment in LAYOUT.fragments:
        for name, mix in MIXES.items():
            engine.load(MODEL.init(3), None)
            if name == "drop":  # Because it is not finite.
                engine.write(fragment, np.full(fragment.size, np.nan, np.float32))
            local = {each.number: engine.read(each) for each in LAYOUT.fragments}
            anchor, new, frame = (gather(each, fragment) for each in (anchors, news, sent))
            held = mixed(partial(np.subtract, anchor, local[fragment.number]), mix, frame.copy)
            local[fragment.number] = new if held is None else new - held
            kept: list[Any] = [engine.keep(fragment, each) for each in (anchor, new, frame)]
            engine.adopt(fragment, kept[0], kept[1], mix, kept[2] if mix.flight else None)
            exact = name != "blend"  # There XLA rounds once where numpy rounds twice.
            for each in LAYOUT.fragments:
                found, wanted = engine.read(each), local[each.number]
                same = np.array_equal if exact else partial(np.allclose, rtol=0, atol=1e-6)
                if not same(found, wanted):
                    wrong.append(f"fragment {each.number} after {name} of {fragment.number}")
            for kept_one in kept:
                kinds = {shard.data.sharding.memory_kind for shard in kept_one.addressable_shards}
                share = max(shard.data.size for shard in kept_one.addressable_shards)
                if kinds != {"pinned_host"} or share * 8 >= fragment.size + 64:
                    wrong.append(f"vector of fragment {fragment.number}: {kinds}, {share}")
    return wrong


def long_frames(step: JaxStep) -> list[str]:
    """Packs a cut vector of more than one chunk; names the codecs that came out otherwise."""
    values = np.random.default_rng(5).standard_normal(2 * CHUNK + 8 * 125, np.float32)
    mesh = step.placement.mesh
    assert mesh is not None
    cut_up = jax.device_put(values, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    wrong = []
    for codec in CODECS[:3]:
        said = replace(header(LAYOUT.fragments[0]), size=values.size, codec=codec)
        if pack_on_device(said, cut_up) != pack(said, values):
            wrong.append(str(codec))
    return wrong


def elsewhere(saved: EngineSnapshot, step: JaxStep) -> dict[str, Any]:
    """Goes on from a checkpoint that was made on another mesh."""
    engine = step.engine()
    engine.load(saved.params, saved.optimizer)
    again = engine.snapshot()
    pairs = ((again.params, saved.params), (again.optimizer, saved.optimizer))
    return {
        "bits": again.place == saved.place
        and all(
            ours.keys() == theirs.keys()
            and all(np.array_equal(ours[name], theirs[name]) for name in ours)
            for ours, theirs in pairs
        ),
        "loss": float(engine.step(BATCHES[0])),
    }


def sharded(step: JaxStep, others: dict[str, JaxStep]) -> dict[str, Any]:
    """Saves where the arrays lie, moves on at once, goes on elsewhere; says what came out right."""
    engine, anchors = step.engine(), MODEL.init(1)
    engine.load(MODEL.init(0), None)
    engine.step(BATCHES[0])
    held = [gather(anchors, each) - engine.read(each) for each in LAYOUT.fragments]
    saved = engine.snapshot().optimizer
    kept = [(each, engine.keep(each, gather(anchors, each))) for each in LAYOUT.fragments]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = OrbaxFolder(Path(name), keep=1)
        engine.save(folder, {"said": "so"}, kept)
        engine.step(BATCHES[1])  # It takes the memory of the arrays that are being written.
        engine.wait()
        folder.wait()
        again = folder.read(1)
        found["notes"] = again.notes["said"]
        found["held"] = all(
            np.array_equal(ours[: theirs.size], theirs)
            for ours, theirs in zip(again.held(), held, strict=True)
        )
        for target, other in others.items():
            heir = other.engine()
            taken = heir.load(MODEL.init(0), again.optimizer)
            bits = heir.snapshot().optimizer
            same = all(np.array_equal(bits[key], saved[key]) for key in saved)
            cut_up = other.placement.mesh is None or max(
                bytes_on(device, jax.tree.leaves(heir.state)) for device in jax.devices()
            ) * 2 < sum(leaf.nbytes for leaf in jax.tree.leaves(heir.state))
            found[target] = taken and same and bits.keys() == saved.keys() and cut_up
            heir.step(BATCHES[1])
        folder.close()
    return found


def shared_memory(step: JaxStep) -> bool:
    """Says whether weights on the devices follow the arrays they came from."""
    weights = MODEL.init(0)
    params = step.placement.place(weights)
    for values in weights.values():
        values[:] = 7.0
    placed = step.placement.fetch(params)
    return any((placed[name] == 7.0).any() for name in weights)


def late_start(step: JaxStep) -> int:
    """Where the learning rate stands of a region that begins after others."""
    engine = step.engine()
    engine.load(MODEL.init(0), None)
    engine.place(5)
    engine.step(BATCHES[0])
    return engine.snapshot().place


def main() -> None:
    use_compile_cache()
    steps = {name: step_on(*asked) for name, asked in MESHES.items()}
    found: dict[str, Any] = {}
    saved: dict[str, EngineSnapshot] = {}
    for name, step in steps.items():
        found[name], saved[name] = account(step)
    on = {"one": "one", "fsdp": "fsdp", "mixed": "all three, scanned"}
    found["restored"] = {
        f"{origin} on {target}": elsewhere(saved[on[origin]], steps[on[target]])
        for origin in on
        for target in on
    }
    names = ("one", "fsdp × tensor", "all three, scanned")
    for origin in ("fsdp", "all three, scanned"):
        others = {name: steps[name] for name in names}
        found[f"sharded {origin}"] = sharded(steps[origin], others)
    found["expected frames"] = expected_frames()
    found["adopts"] = adopts(steps["all three, scanned"])
    found["long frames"] = long_frames(steps["fsdp × tensor"])
    found["shared memory"] = shared_memory(steps["fsdp"])
    found["late start"] = late_start(steps["fsdp"])
    mesh = steps["all three, scanned"].placement.mesh
    q, k, v = queries_keys_values(batch=4, sequence=128, heads=4, kv_heads=2, head=32)
    difference = np.asarray(splash(q, k, v, mesh, interpret=True)) - by_hand(q, k, v)
    found["others"] = {
        family: {name: other(model, name) for name in names} for family, model in OTHERS.items()
    }
    found["sorted experts"] = sorted_experts(steps["fsdp × tensor"])
    found["splash"] = float(np.abs(difference).max())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
