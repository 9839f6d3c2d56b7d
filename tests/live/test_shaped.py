"""The same upload over a link that the kernel shapes, where this machine lets us make one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shaped import NotHere, forward, shaped

from diloco_cli.cli.link_stage import stage
from diloco_cli.net.client import Server

pytestmark = pytest.mark.live


def test_an_upload_through_a_shaped_veth_arrives(tmp_path):
    try:
        with shaped("40mbit") as link, stage(800_000) as running:
            with Server(running.url) as server:
                running.join(server)
                data = running.frame(server.run().run)
            file = tmp_path / "frame"
            file.write_bytes(data)
            with forward(link.address, ("127.0.0.1", running.port)) as port:
                script = Path(__file__).with_name("shaped.py")
                said = link.inside(
                    *(sys.executable, str(script), link.address, str(port)),
                    *(str(running.clock), str(running.epoch), str(file)),
                ).stdout
            assert said.strip() == "pending"
            sent, waited = link.counted()
            assert sent > len(data) and waited > 0
    except NotHere as why:
        pytest.skip(str(why))
