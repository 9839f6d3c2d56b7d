"""One model on the devices of two processes, led by this one; what came out, as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m tests.worker.hosts.two_processes FOLDER
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.assemble import spelled_out
from diloco_cli.core.fragments import Fragment, cut, gather
from diloco_cli.core.unmerged_work import Mix
from diloco_cli.launch.ports import free_addresses
from diloco_cli.models.decoder import Decoder
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.frame import Header, pack
from diloco_cli.worker.engines.devices import open_mesh
from diloco_cli.worker.engines.jax_engine import JaxStep, make_step, use_compile_cache
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.many_hosts import LeadStep, SentValues, join_processes
from diloco_cli.worker.engines.orbax_folder import OrbaxFolder
from diloco_cli.worker.handover import trainer_digest
from diloco_cli.worker.hosts.follower_supervisor import FollowerSupervisor
from diloco_cli.worker.hosts.lead import Lead, leave
from diloco_cli.worker.hosts.listener import RegionTerms
from diloco_cli.worker.hosts.which_host import HostPlace
from tests.worker.engines.eight_devices import CODECS

SECRET = b"known to both"
MODEL = Decoder(layers=2, width=32, heads=4, kv_heads=2, ffn=64)
LAYOUT = cut(MODEL.tensors(), len(CODECS))
SOURCE = np.random.default_rng(3)
BATCHES = [SOURCE.integers(0, 256, (8, 17), dtype=np.int32) for _ in range(4)]


def spec_of(mesh: dict[str, int], form: dict[str, Any]) -> RunSpec:
    fields = [field.name for field in dataclasses.fields(MODEL) if field.init]
    model = {"kind": "decoder"} | {name: getattr(MODEL, name) for name in fields}
    spec = {
        "spec": 1,
        "name": "pair",
        "budget": {"tokens": 10**9},
        "model": {key: value for key, value in model.items() if value is not None},
        "inner": {"batch": 8, "sequence": 16, **form},
        "regions": [{"name": "paris", "mesh": mesh, "hosts": 2}],
        "sync": {"fragments": 5},
    }
    return spelled_out(RunSpec.model_validate(spec))


def header(fragment: Fragment) -> Header:
    return Header.contribution(
        run="run-1",
        layout=LAYOUT.digest,
        fragment=fragment.number,
        size=fragment.size,
        codec=CODECS[fragment.number],
        base=0,
        region="paris",
    )


def digests(frames: Iterable[bytes]) -> list[str]:
    return [hashlib.sha256(frame).hexdigest() for frame in frames]


def expected_frames() -> list[str]:
    """What the host writes of the same weights."""
    anchors, moved = MODEL.init(0), MODEL.init(1)
    return digests(
        pack(header(each), gather(anchors, each) - gather(moved, each)) for each in LAYOUT.fragments
    )


def account(step: Any) -> dict[str, Any]:
    """Trains, writes frames, adopts, and goes on from its own snapshot."""
    engine, anchors, news = step.engine(), MODEL.init(0), MODEL.init(1)
    engine.load(MODEL.init(0), None)
    losses = []
    for batch in BATCHES:
        losses.append(float(engine.step(batch)))
    saved = engine.snapshot()
    reads = [engine.read(each) for each in LAYOUT.fragments]
    same = all(
        np.array_equal(read, gather(saved.params, each))
        for read, each in zip(reads, LAYOUT.fragments, strict=True)
    )
    adopted = []
    for each, read in zip(LAYOUT.fragments, reads, strict=True):
        anchor, new = (engine.keep(each, gather(values, each)) for values in (anchors, news))
        shown = np.asarray(anchor)[: each.size]
        assert np.array_equal(shown, gather(anchors, each))
        engine.adopt(each, anchor, new, Mix(1.0, 1.0), anchor)
        held = gather(anchors, each) - read
        wanted = gather(news, each) - (held - gather(anchors, each))
        adopted.append(bool(np.array_equal(engine.read(each), wanted)))
    found = {
        "losses": losses,
        "reads agree": bool(same),
        "adopted": adopted,
        "heldout": engine.evaluate(saved.params, [BATCHES[0], BATCHES[1][:5]]),
        "fits": engine.load(saved.params, saved.optimizer),
        "restored": float(engine.step(BATCHES[0])),
        "place": engine.place_now(),
    }
    engine.load(MODEL.init(1), None)
    kept = [engine.keep(each, gather(anchors, each)) for each in LAYOUT.fragments]
    begun = [
        engine.held(each, anchor, header(each).codec)
        for each, anchor in zip(LAYOUT.fragments, kept, strict=True)
    ]
    engine.step(BATCHES[0])
    found["frames"] = digests(
        work.pack(header(each), level=1) for each, work in zip(LAYOUT.fragments, begun, strict=True)
    )
    return found


def sharded(one: JaxStep, two: LeadStep, folder: Path) -> dict[str, Any]:
    """Saves where the arrays lie, on both hosts; goes on from there, on both and on one device."""
    engine, anchors = two.engine(), MODEL.init(0)
    engine.load(MODEL.init(0), None)
    for batch in BATCHES:
        engine.step(batch)
    kept = [(each, engine.keep(each, gather(anchors, each))) for each in LAYOUT.fragments]
    held = [gather(anchors, each) - engine.read(each) for each in LAYOUT.fragments]
    params, checkpoints = engine.snapshot().params, OrbaxFolder(folder, keep=2)
    numbers = []
    for number in range(3):
        engine.save(checkpoints, {"number": number}, kept)
        engine.step(BATCHES[0])  # Beside the writing.
        checkpoints.wait()
        engine.load(params, checkpoints.read(checkpoints.numbers()[0]).optimizer)
        numbers.append(sorted(checkpoints.numbers()))
    saved = checkpoints.read(checkpoints.numbers()[0])
    found = {
        "numbers": numbers,
        "notes": saved.notes["number"],
        "parts": sorted(path.name for path in folder.glob("3/state/ocdbt.process_*")),
        "held": all(
            np.array_equal(mine, theirs[: mine.size])
            for mine, theirs in zip(held, saved.held(), strict=True)
        ),
        "fits": [engine.load(params, saved.optimizer)],
        "losses": [float(engine.step(BATCHES[1]))],
    }
    alone = one.engine()
    found["fits"].append(alone.load(params, saved.optimizer))
    found["losses"].append(float(alone.step(BATCHES[1])))
    checkpoints.close()
    return found


def speeds(orders: Lead) -> dict[int, float]:
    """What each host took for the same work; the follower tells us beside its other work."""
    deadline = time.monotonic() + 60.0
    while not orders.speeds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return orders.speeds()


def lead(folder: Path, mesh: dict[str, int], form: dict[str, Any]) -> None:
    use_compile_cache()
    spec = spec_of(mesh, form)
    place = HostPlace(0, 2, free_addresses(1)[0])
    other = dataclasses.replace(place, host=1)
    terms = RegionTerms(place, spec, "paris", trainer_digest(spec, "paris"))
    orders = Lead(terms, SECRET, folder)
    supervisor = FollowerSupervisor(
        spec, "paris", other, SECRET, Wakeup(), folder / "follower.log", cores=None
    )
    threading.Thread(target=supervisor.run, kwargs={"wait": 60.0}, daemon=True).start()
    orders.gather(lambda _: None, lambda: "")
    join_processes(orders.open_devices(), hosts=2, host=0)
    inner = spec.inner_of("paris")
    rate = RatePlan.of(inner, 50, 10**9)
    region = spec.region("paris")
    values = SentValues(orders)
    step = make_step(MODEL, inner, rate, mesh=open_mesh(region), transfer=values)
    announced = {"rate": dataclasses.asdict(rate), "separator": None}
    one: JaxStep = make_step(MODEL, inner, rate)
    print(
        json.dumps(
            {
                "one": account(one),
                "two": account(LeadStep(step, orders, announced)),
                "sharded": sharded(one, LeadStep(step, orders, announced), folder / "sharded"),
                "expected frames": expected_frames(),
                "speeds": speeds(orders),
            }
        ),
        flush=True,
    )
    orders.close()
    leave(0)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        lead(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    except Exception:  # JAX would wait for the other process before this one ends.
        leave(1, traceback.format_exc())
