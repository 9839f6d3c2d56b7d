"""Two processes with two devices each compute what one device computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.live


MESH = {"fsdp": 2, "tensor": 2}


def test_two_processes_of_two_devices_are_one_device(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    options = [str(tmp_path), json.dumps(MESH), json.dumps({})]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.hosts.two_processes", *options],
        cwd=ROOT,
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
    )
    follower = tmp_path / "follower.log"
    said = follower.read_text() if follower.exists() else ""
    assert ended.returncode == 0, f"{ended.stderr[-3000:]}\n{said[-3000:]}"
    found = json.loads(ended.stdout.splitlines()[-1])
    one, two = found["one"], found["two"]
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert two["heldout"] == pytest.approx(one["heldout"], abs=1e-5)
    assert two["restored"] == pytest.approx(one["restored"], abs=1e-5)
    assert two["fits"] and two["place"] == one["place"] == 5
    assert two["reads agree"] and all(two["adopted"])
    sharded = found["sharded"]
    assert sharded["numbers"] == [[1], [1, 2], [2, 3]] and sharded["notes"] == 2
    assert sharded["parts"] == ["ocdbt.process_0", "ocdbt.process_1"]
    assert sharded["held"] and sharded["fits"] == [True, True]
    assert sharded["losses"][0] == pytest.approx(sharded["losses"][1], abs=1e-5)
    assert found["speeds"].keys() == {"0", "1"} and all(found["speeds"].values())
    assert two["frames"] == one["frames"] == found["expected frames"]


OTHER_HOST = """
import jax
from jax._src import distributed
from diloco_cli.worker.engines import many_hosts
distributed.global_state.process_id = 1
many_hosts._keep_compiled(1)
jax.jit(lambda x: x + 1.0)(1.0)
"""


def test_another_host_than_the_first_keeps_what_it_compiled(tmp_path):
    subprocess.run(
        [sys.executable, "-c", OTHER_HOST],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        check=True,
    )
    folder = tmp_path / ".cache" / "diloco" / "compile" / "host-1"
    assert [*folder.glob("jit_*")], "it would compile again at every start"
