"""The same upload over a link that the kernel shapes, where this machine lets us make one."""

from __future__ import annotations

import sys

import pytest

from diloco_cli.bench.support.one_fragment_server import stage
from diloco_cli.net.client import Client
from tests.live.links.network_namespace import NotHere, forward, shaped

pytestmark = pytest.mark.live


def test_an_upload_through_a_shaped_veth_arrives(tmp_path):
    try:
        with shaped("40mbit") as link, stage(800_000) as running:
            with Client(running.url) as server:
                running.join(server)
                data = running.frame(server.run().run)
            file = tmp_path / "frame"
            file.write_bytes(data)
            with forward(link.address, ("127.0.0.1", running.port)) as port:
                said = link.inside(
                    *(
                        sys.executable,
                        "-m",
                        "tests.live.links.network_namespace",
                        link.address,
                        str(port),
                    ),
                    *(str(running.clock), str(running.epoch), str(file)),
                ).stdout
            assert said.strip() == "pending"
            sent, waited = link.counted()
            assert sent > len(data) and waited > 0
    except NotHere as why:
        pytest.skip(str(why))
