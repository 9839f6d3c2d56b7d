"""A real server with one fragment of any size, in a process of its own, and a region to use it.

For measuring and testing transfers: the routes, the store and the checks are those of every
run; only the model is made up.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from diloco_cli.bench.support.children import end, made, start
from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import RunFailed
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import NOBODY, Credentials, load_credentials
from diloco_cli.server.access.issue import CredentialFolder, bundle
from diloco_cli.server.settings import ServerSettings
from diloco_cli.spec.schema import Choice, RunSpec
from diloco_cli.wire.frame import Header, pack

REGIONS = ("here", "there")
START_SECONDS = 120.0


def made_up(values: int, up: Choice, certs: str | None = None) -> ServerSettings:
    """A run of one fragment of so many values that never ends by itself."""
    spec = RunSpec.model_validate(
        {
            "spec": 1,
            "name": "link",
            "budget": {"tokens": 10**12},
            "inner": {"batch": 4, "sequence": 8},
            "regions": [{"name": name} for name in REGIONS],
            # One region alone is no quorum: what it sends is taken in and stays.
            "sync": {"fragments": 1, "every": 6, "quorum": 2},
            "wire": {"up": up},
            "outer": {"kind": "sgd", "lr": 1.0},
            "server": {"listen": "127.0.0.1:0", "lease": 600.0, "certs": certs},
        }
    )
    return ServerSettings.of(spec, (Tensor("w", (values,)),))


@dataclass
class OneFragmentServer:
    """The running server, as far as a client needs to know it."""

    settings: ServerSettings
    folder: Path
    process: BaseProcess
    clock: int = 0
    epoch: int = field(default=0)

    @property
    def credentials(self) -> Credentials:
        """Who the first region is to a server that asks."""
        certs = self.settings.spec.server.certs
        return load_credentials(bundle(Path(certs), "upload", REGIONS[0])) if certs else NOBODY

    @property
    def url(self) -> str:
        """Where the server is; waits until it listens."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, ValueError):
                address = json.loads((self.folder / "server" / "address.json").read_bytes())
                if address["pid"] == self.process.pid:
                    return address["url"]
            if not self.process.is_alive() or time.monotonic() > deadline:
                raise RunFailed("The server of the measurement did not start.")
            time.sleep(0.01)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def join(self, server: Client) -> None:
        """Speaks for the first region from now on."""
        server.run()
        joined = server.join(
            REGIONS[0],
            owner="o",
            boot=1,
            spec_digest=self.settings.spec_digest,
            layout_digest=self.settings.layout.digest,
        )
        self.epoch = joined.epoch

    def frame(self, run: str, *, clock: int | None = None, seed: int = 0) -> bytes:
        """A contribution of random values, as the region's trainer would post it."""
        if clock is None:
            self.clock += 1
        size = self.settings.sizes[0]
        values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
        header = Header.contribution(
            run=run,
            layout=self.settings.layout.digest,
            fragment=0,
            size=size,
            codec=self.settings.spec.wire.up,
            base=0,
            region=REGIONS[0],
            clock=self.clock if clock is None else clock,
            tokens=192.0,
            steps=6.0,
        )
        return pack(header, 0.01 * values)

    def restart(self) -> None:
        """Kills the server, without a goodbye, and starts it again on the same port."""
        self.stop()
        self.process = _server(self.settings, self.folder)
        start(self.process)

    def stop(self) -> None:
        end(self.process)


@contextlib.contextmanager
def stage(
    values: int, up: Choice | None = None, *, tls: bool = False
) -> Iterator[OneFragmentServer]:
    """A server with one fragment of `values` values, until the block ends.

    With `tls` it asks everybody for a certificate and a token.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-link-") as name:
        folder = Path(name)
        certs = _issued(folder / "certs") if tls else None
        settings = made_up(values, up or {"kind": "fp32"}, certs)
        running = OneFragmentServer(settings, folder, _server(settings, folder))
        try:
            start(running.process)
            yield running
        finally:
            running.stop()


def _issued(folder: Path) -> str:
    credentials = CredentialFolder(folder)
    credentials.create_missing("link", [], 2)
    credentials.issue("upload", REGIONS[0], 2, renew=False)
    return str(folder)


def _server(settings: ServerSettings, folder: Path) -> BaseProcess:
    spec = settings.spec
    setup = settings.sizes[0], spec.wire.up, spec.server.certs
    return made(_serve, setup, str(folder))


def _serve(setup: tuple[int, Choice, str | None], folder: str) -> None:
    from diloco_cli.server.lifecycle import serve

    with open(Path(folder) / "log", "ab") as log:
        os.dup2(log.fileno(), 2)

    def initial() -> dict[str, np.ndarray]:
        return {"w": np.random.default_rng(1).normal(size=setup[0]).astype(np.float32)}

    serve(made_up(*setup), Path(folder), initial)
