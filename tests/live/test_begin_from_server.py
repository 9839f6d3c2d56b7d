"""A new run asks a running server for its weights, and begins with exactly those."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco_cli.net.client import Client
from tests.live.processes import Live

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_a_server_gives_a_new_run_its_weights(live, tmp_path: Path):
    old = live({"name": "left"}, seed=5)
    old.serve()
    url = old.address["url"]
    new = Live(tmp_path / "new", [{"name": "left"}], start={"weights": url})
    try:
        new.serve()
        status = new.status()
        assert status.start and status.start.source.startswith(f"{url} (run {old.status().run}")
        for server, out in ((url, "old"), (new.address["url"], "new")):
            with Client(server) as client:
                client.weights(tmp_path / f"{out}.safetensors")
    finally:
        new.launcher.stop(new.started, grace=0.0)
    theirs, ours = (load_file(tmp_path / f"{name}.safetensors") for name in ("old", "new"))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    assert not list((tmp_path / "new").glob(".start*")), "what was fetched is not left behind"
