"""A region's step is the same step on any mesh, and what leaves its devices is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.spec.schema import RegionSpec
from diloco_cli.worker.engines.devices import open_mesh
from tests import ROOT

pytestmark = pytest.mark.timeout(1200)
"""The process below compiles some thirty programs, which takes minutes on a busy machine."""

FLOAT32 = ["fsdp", "fsdp × tensor", "fsdp, scanned", "all three, scanned", "fsdp, micro-batches"]


@pytest.fixture(scope="module")
def found() -> dict:
    """What a process with eight forced devices found out; JAX reads their number once."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.engines.eight_devices"],
        cwd=ROOT,
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", FLOAT32)
def test_losses_are_those_of_one_device(found, mesh):
    assert found[mesh]["losses"] == pytest.approx(found["one"]["losses"], abs=1e-5)
    assert found[mesh]["heldout"] == pytest.approx(found["one"]["heldout"], abs=1e-5)


@pytest.mark.parametrize("family", ["gemma4", "experts"])
def test_losses_of_other_families_too(found, family):
    """Layers of two kinds; experts, whose router must send every token where it did."""
    one, *meshes = found["others"][family].values()
    assert max(one["losses"]) - min(one["losses"]) > 0.01
    for mesh in meshes:
        assert mesh["losses"] == pytest.approx(one["losses"], abs=1e-5)
        # Twice on eight devices at the most, and the norms.
        assert mesh["share"] < 1 / 4 + 0.03


def test_experts_that_work_on_their_own_tokens_do_so_on_a_mesh(found):
    assert found["sorted experts"] < 1e-4


def test_bfloat16_rounds_the_losses_and_no_more(found):
    rounded, exact = found["bfloat16"]["losses"], found["one"]["losses"]
    assert rounded == pytest.approx(exact, abs=2e-2)
    assert rounded != pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("mesh", ["one", *FLOAT32, "bfloat16"])
def test_frames_are_those_of_the_host_byte_for_byte(found, mesh):
    assert found[mesh]["frames"] == found["expected frames"]
    assert found[mesh]["reads agree"]


def test_so_are_frames_of_several_chunks(found):
    assert found["long frames"] == []


def test_versions_are_adopted_as_the_host_would_and_vectors_rest_in_its_memory(found):
    assert found["adopts"] == []


@pytest.mark.parametrize("mesh", [*FLOAT32, "bfloat16"])
def test_a_step_is_compiled_once(found, mesh):
    assert found[mesh]["compilations"] == 1


@pytest.mark.parametrize(
    "mesh, share",
    [("one", 1.0), ("fsdp", 1 / 8), ("fsdp × tensor", 1 / 8), ("fsdp, scanned", 1 / 8)],
)
def test_weights_and_optimiser_are_dealt_out(found, mesh, share):
    """All but the norms, which are a few hundredths of so small a model."""
    assert share <= found[mesh]["share of a device"] < share + 0.03


def test_a_checkpoint_is_restored_on_any_mesh_in_any_form(found):
    for name, again in found["restored"].items():
        assert again["bits"], name
        origin = "one on one" if name.startswith("one") else f"{name.split()[0]} on one"
        assert again["loss"] == pytest.approx(found["restored"][origin]["loss"], abs=1e-5), name


def test_weights_on_the_devices_do_not_follow_the_arrays_they_came_from(found):
    assert not found["shared memory"]


def test_a_late_region_begins_where_the_learning_rate_stands(found):
    assert found["late start"] == 6


def test_splash_attention_works_on_each_devices_share(found):
    assert found["splash"] < 2e-5


def test_more_devices_than_there_are_is_an_error_with_a_way_out():
    region = RegionSpec.model_validate({"name": "paris", "mesh": {"fsdp": 500, "tensor": 2}})
    with pytest.raises(
        SpecError, match=r"paris asks for 1000 devices \(fsdp 500 × tensor 2\)"
    ) as at:
        open_mesh(region)
    assert "start it on a host with 1000" in (at.value.hint or "")


def test_one_device_is_no_mesh():
    assert open_mesh(RegionSpec(name="paris")) is None
    assert open_mesh(RegionSpec(name="paris", devices=1)) is None


@pytest.mark.parametrize("origin", ["fsdp", "all three, scanned"])
def test_a_sharded_checkpoint_is_restored_on_any_mesh_in_any_form(found, origin):
    assert found[f"sharded {origin}"] == {
        "notes": "so",
        "held": True,
        "one": True,
        "fsdp × tensor": True,
        "all three, scanned": True,
    }
