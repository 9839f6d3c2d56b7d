"""Regions of unlike meshes train one model, and one that comes back on another mesh goes on."""

from __future__ import annotations

import os
import signal

import pytest

from diloco_cli.spec.resolved import resolved, write_resolved
from diloco_cli.spec.schema import RunSpec
from tests.live.processes import Live

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def with_mesh(live: Live, mesh: dict[str, int], **inner: object) -> None:
    """What its own host says of the devices of `right`; the run is the same."""
    data = resolved(live.spec)
    shared = {"kind": "orbax", "to": str(live.folder.with_name("checkpoints"))}
    data["regions"][1] |= {"mesh": mesh, "inner": inner or None, "checkpoint": shared}
    folder = live.folder.with_name("-".join(f"{axis}{count}" for axis, count in mesh.items()))
    live.file = write_resolved(RunSpec.model_validate(data), folder)


@pytest.mark.long
def test_a_region_that_comes_back_on_another_mesh_goes_on(live, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    run = live({"name": "left", "speed": 0.2}, {"name": "right"}, sync={"fragments": 2, "every": 8})
    server, home = run.serve(), tmp_path / "right"
    left = run.work("left")
    step = applied = 0
    forms = [({"fsdp": 2, "tensor": 2}, {}), ({"data": 2}, {"remat": "block", "loss_chunks": 2})]
    for mesh, inner in forms:
        with_mesh(run, mesh, **inner)
        right = run.work("right", home)

        def further(step: int = step, applied: float = applied) -> bool:
            region = run.region("right")
            return bool(region.step and region.step > step) and merged() > applied

        def merged() -> float:
            return (run.region("right").share or 0.0) * run.status().tokens.applied

        run.wait_for(further, server, left, right)
        os.kill(right.pid, signal.SIGTERM)
        assert run.exit_code(right) == 0
        found = run.region("right")
        assert found.lost == 0
        step, applied = found.step or 0, merged()

    with_mesh(run, {"data": 8}, batch=8)
    too_large = run.work("right", home)
    assert run.exit_code(too_large) == 2
    words = too_large.last_words()
    assert "right asks for 8 devices (data 8), but JAX finds 4 of kind cpu" in words.message
    assert "start it on a host with 8" in (words.hint or "")
    os.kill(left.pid, signal.SIGTERM)
    assert run.exit_code(left) == 0
    os.kill(server.pid, signal.SIGTERM)
    run.exit_code(server)
    summary = run.summary()
    assert list(tmp_path.glob("checkpoints/*/right/*/state"))
    assert not list(home.rglob("checkpoint.safetensors"))
    assert summary["balanced"] and summary["regions"]["right"]["lost"] == 0
