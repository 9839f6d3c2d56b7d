"""Host 0: who may take part, and whoever may not hears why.

A host that calls says who it is and what it works by. All hosts of a region must have the same
release and the same settings: one that differs would start another program than the rest, and
all would wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_cli.core.terms import flat
from diloco_cli.errors import DilocoError, LinkError, SpecError
from diloco_cli.spec.amendable import trainer_reads
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import WIRE_VERSION
from diloco_cli.worker.handover import trainer_digest
from diloco_cli.worker.hosts.connection import HostConnection, accept, join_address
from diloco_cli.worker.hosts.which_host import HostPlace

log = logging.getLogger(__name__)

STRANGERS = 16
"""Callers at a time that have not proved yet who they are."""
LONGEST_VALUE = 60


@dataclass(frozen=True)
class HostHello:
    """What a host says of itself when it calls."""

    role: str
    """`supervisor` or `follower`."""
    host: int
    hosts: int
    run: str
    region: str
    release: str
    digest: str = ""
    """Of the settings in its own file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """These settings, so that the one that differs can be named."""
    generation: str = ""
    """follower: the one that it was started for."""

    @classmethod
    def of(cls, role: str, place: HostPlace, spec: RunSpec, region: str, **more: Any) -> HostHello:
        return cls(
            role=role,
            host=place.host,
            hosts=place.hosts,
            run=spec.name,
            region=region,
            release=release(),
            digest=trainer_digest(spec, region),
            settings=_settings(spec, region),
            **more,
        )

    def record(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class RegionTerms:
    """What all hosts of a region must agree on."""

    place: HostPlace
    spec: RunSpec
    """What the lead trains by: its own file with the amendments over it."""
    region: str
    own: str
    """Digest of the settings in host 0's own file."""

    def check(self, hello: HostHello) -> None:
        """Raises SpecError for a host that cannot take part."""
        where = f"host {hello.host}"
        named = f"{self.spec.name}/{self.region}", f"{hello.run}/{hello.region}"
        if named[0] != named[1]:
            raise SpecError(
                f"Host 0 is of {named[0]}, {where} of {named[1]}.",
                hint="Give every region a coordinator address of its own.",
            )
        if hello.hosts != self.place.hosts or not 0 < hello.host < self.place.hosts:
            raise SpecError(
                f"Region {self.region} has {self.place.hosts} hosts, says host 0; the caller says "
                f"it is host {hello.host} of {hello.hosts}.",
                hint="Start all hosts with the same --hosts, and each with a --host of its own.",
            )
        if hello.release != release():
            raise SpecError(
                f"Host 0 runs {release()}, {where} runs {hello.release}.",
                hint="Install the same release on all hosts of a region.",
            )
        if hello.digest != self.own:
            raise SpecError(
                f"The spec of {where} is not that of host 0: {self._difference(hello)}.",
                hint="Give all hosts of a region the same file and the same --set options.",
            )

    def _difference(self, hello: HostHello) -> str:
        ours = json.loads(json.dumps(_settings(self.spec, self.region)))
        for key in sorted(ours.keys() | hello.settings.keys()):
            here, there = (_short(each.get(key)) for each in (ours, hello.settings))
            if here != there:
                return f"{key} is {there} there and {here} on host 0"
        return "an amended key differs in the two files"


def release() -> str:
    """What must be equal on all hosts for them to start the same programs."""
    version = importlib.metadata.version
    return f"diloco {version('diloco-cli')} (wire {WIRE_VERSION}) with jax {version('jax')}"


def _settings(spec: RunSpec, region: str) -> dict[str, Any]:
    return {key: value for key, value in flat(resolved(spec)) if trainer_reads(key, region)}


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


class HostListener:
    """Listens for the other hosts, in a thread of its own."""

    def __init__(
        self,
        place: HostPlace,
        secret: bytes,
        answer: Callable[[HostHello, HostConnection], None],
        *,
        wait: float,
    ) -> None:
        """`answer` is called in a thread of each caller; `wait` for whoever listens there still."""
        self._secret, self._answer = secret, answer
        self._socket = _listen(place, wait)
        self._room = threading.Semaphore(STRANGERS)
        threading.Thread(target=self._accept, name="hosts", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, address = self._socket.accept()
            except OSError:
                return  # It was closed.
            self._room.acquire()
            arguments = caller, address[0]
            threading.Thread(target=self._meet, args=arguments, name="host", daemon=True).start()

    def _meet(self, caller: socket.socket, address: str) -> None:
        connection = None
        try:
            try:
                connection = accept(caller, self._secret)
                message, _ = connection.receive()
                hello = HostHello(**message)
            finally:
                self._room.release()
            self._answer(hello, connection)
        except DilocoError as error:
            log.info(f"{address} was not let in: {error.message}")
            if connection and isinstance(error, SpecError):
                with contextlib.suppress(LinkError):
                    connection.send(ending(error))
        except (OSError, TypeError, ValueError) as error:
            log.info(f"{address} was not understood: {error}")
        finally:
            caller.close()


def ending(error: DilocoError | None) -> dict[str, Any]:
    """The message that ends a follower supervisor: the run is over, or it cannot take part."""
    if error is None:
        return {"over": 0}
    return {"over": error.exit_code, "message": error.message, "hint": error.hint}


def _listen(place: HostPlace, wait: float) -> socket.socket:
    host, port = place.address
    deadline = time.monotonic() + wait
    while True:
        try:
            return socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=256,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                threading.Event().wait(0.2)  # The lead before us is still leaving.
                continue
            raise SpecError(
                f"Host 0 cannot listen at {join_address(host, port)}: {error.strerror or error}.",
                hint="--coordinator is an address of host 0 itself, with a port that is free.",
            ) from None
