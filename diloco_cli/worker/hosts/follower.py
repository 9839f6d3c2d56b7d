"""A process that obeys the lead's orders: no mail, no books, no clock, no disk.

It ends with its supervisor, whose pipe it reads, and with the lead, whose orders it hears; both
at once and whatever it is doing, because its devices may be waiting for ones that are gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_cli.core.fragments import cut
from diloco_cli.errors import DilocoError, LinkError
from diloco_cli.models import models
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.failpoints import reach
from diloco_cli.worker.engines.devices import open_mesh
from diloco_cli.worker.engines.jax_engine import make_step
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.many_hosts import FollowerEngine, ReceivedValues, join_processes
from diloco_cli.worker.hosts.connection import ConnectionClosed, HostConnection, connect
from diloco_cli.worker.hosts.lead import leave
from diloco_cli.worker.hosts.listener import HostHello, release
from diloco_cli.worker.hosts.secret import inherited
from diloco_cli.worker.hosts.which_host import HostPlace
from diloco_cli.worker.trainer.task import set_up

CONNECT_SECONDS = 20.0

BuildSpec = Callable[[Mapping[str, Any]], RunSpec]


def follow(
    place: HostPlace,
    run: str,
    region: str,
    generation: str,
    *,
    build: BuildSpec,
    own: str,
    cores: Sequence[int] | None = None,
) -> int:
    """Follows the lead of one generation to its end."""
    _end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Our supervisor says when it is time.
    set_up(cores)
    connection = connect(place.address, inherited(), seconds=CONNECT_SECONDS)
    hello = HostHello(
        "follower", place.host, place.hosts, run, region, release(), own, generation=generation
    )
    connection.send(hello.record())
    message, _ = connection.receive()
    if why := message.get("message") or message.get("later"):
        raise LinkError(why, hint=message["hint"])
    try:
        _Follower(connection, place, build(message["spec"]), region).run()
    except DilocoError as error:
        leave(error.exit_code, error.message, error.hint)
    except Exception as error:
        leave(1, f"{type(error).__name__}: {error}"[:2000])
    leave(0)


class _Follower:
    def __init__(
        self, connection: HostConnection, place: HostPlace, spec: RunSpec, region: str
    ) -> None:
        self._connection, self._place, self._spec, self._region = connection, place, spec, region
        self._heard: queue.SimpleQueue[tuple[dict[str, Any], memoryview]] = queue.SimpleQueue()
        self._ended = False
        self._engine: FollowerEngine | None = None
        self._next = 0
        self._telling = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        while True:
            message, values = self._heard.get()
            name, arguments = message["order"], message["with"]
            if "n" in message:
                if message["n"] != self._next:
                    leave(1, f"order {message['n']} came where {self._next} was due")
                self._next += 1
            if self._engine and message.get("forget"):
                self._engine.forget(message["forget"])
            if name == "end":
                return
            if name == "join":
                self._join(**arguments)
            elif name == "build":
                self._build(**arguments)
            else:
                assert self._engine is not None
                self._engine.obey(name, arguments, values)

    def _join(self, address: str) -> None:
        join_processes(address, hosts=self._place.hosts, host=self._place.host)
        reach("follower.joined")

    def _build(self, rate: Mapping[str, Any], separator: int | None) -> None:
        spec, inner = self._spec, self._spec.inner_of(self._region)
        model = models.build(spec.model)
        step = make_step(
            model,
            inner,
            RatePlan(**rate),
            mesh=open_mesh(spec.region(self._region)),
            separator=separator,
            transfer=ReceivedValues(self._values),
        )
        layout = cut(model.tensors(), spec.sync.fragments)
        self._engine = FollowerEngine(step, layout, self)
        gc.freeze()

    def tell_speed(self, seconds: float) -> None:
        self._tell({"speed": seconds})

    def tell_unsaved(self, why: str) -> None:
        self._tell({"unsaved": why})

    def _tell(self, message: dict[str, Any]) -> None:
        with self._telling, contextlib.suppress(ConnectionClosed):  # Whoever listens ends us.
            self._connection.send(message)

    def _values(self) -> memoryview:
        message, values = self._heard.get()
        assert "order" not in message, message
        return values

    def _listen(self) -> None:
        try:
            while True:
                message, values = self._connection.receive()
                self._heard.put((message, values))
                if message.get("order") == "end":
                    return
        except ConnectionClosed:
            leave(1, "the lead is gone")


def _end_with_parent() -> None:
    """Ends this process when its supervisor is gone, whatever it does at the moment."""

    def read() -> None:
        try:
            while os.read(0, 4096):
                pass
        finally:
            leave(1, "the supervisor of this follower is gone")

    threading.Thread(target=read, name="parent", daemon=True).start()
