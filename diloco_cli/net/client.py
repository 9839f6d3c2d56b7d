"""The calls of the HTTP API, typed.

    control (short, waiting)   run, join, heartbeat, calls, latest, status, stop, events
    bulk (frames, weights)     submit, whole, chain, weights

A refusal by the server becomes an exception with the server's own message and hint. What
the protocol treats as an answer is returned as one: the decision on a contribution is an
`Answer`, no news within the waiting time is None, and so is a chain the server no longer has.

Long bodies travel in parts and ranges over several connections and resume where they broke
off. Control calls have a connection of their own, so that they never wait behind a body.

A `Client` is not shared between threads: use one in each.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from diloco_cli.errors import StoreError, WireError
from diloco_cli.net.connection import Connection
from diloco_cli.net.options import DEFAULTS, Options
from diloco_cli.net.refusal import (
    Dismissed,
    FencedError,
    Gone,
    Held,
    OlderCopy,
    other_wire,
    read,
    refusal,
)
from diloco_cli.net.transfer.bodies import Transfer
from diloco_cli.observe.status import Status
from diloco_cli.system.files import sync_file, sync_folder
from diloco_cli.wire import messages
from diloco_cli.wire.error_bodies import parse_error
from diloco_cli.wire.frame import Frame, most_bytes, open_frame, read_chain
from diloco_cli.wire.messages import (
    EPOCH_HEADER,
    LONG_POLL_SECONDS,
    RUN_HEADER,
    WIRE_HEADER,
    WIRE_VERSION,
    Amend,
    Amended,
    Amendments,
    Answer,
    Heartbeat,
    Join,
    Joined,
    Latest,
    Message,
    News,
    Run,
    Stopping,
    TextOrder,
    parse,
)

__all__ = ["Client", "Dismissed", "FencedError", "Gone", "Held", "OlderCopy"]

M = TypeVar("M", bound=Message)
T = TypeVar("T")

MOST_ANSWER_BYTES = 16 << 20
"""The longest JSON document that is read; a status of thousands of regions is shorter."""

JSON = {"content-type": "application/json"}


class Client:
    """A client of the aggregation server at `url`."""

    def __init__(
        self,
        url: str,
        options: Options = DEFAULTS,
        *,
        run: str = "",
        stop: threading.Event | None = None,
    ) -> None:
        """Opens no connection yet. `run` is the run's id; `run()` learns it when left out.

        When `stop` is set, no call waits for another try.
        """
        self.timeouts = options.timeouts
        self._run_id = run
        self._run: Run | None = None
        self._control = Connection(url, options, options.control_backend, stop=stop)
        self._transfer = Transfer(url, options, stop=stop)
        self.up, self.down = self._transfer.up, self._transfer.down
        """The throughput measured in each direction."""
        self.url = self._control.url

    def close(self) -> None:
        self._control.close()
        self._transfer.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Control

    def run(self) -> Run:
        """Says which run this is and what every region must share."""
        run = self._ask("GET", messages.RUN, Run)
        if run.wire != WIRE_VERSION:
            raise other_wire(self.url, run.wire)
        self._run_id = self._run_id or run.run
        self._run = run
        return run

    def join(
        self,
        region: str,
        *,
        owner: str,
        boot: int,
        spec_digest: str,
        layout_digest: str,
        order: TextOrder | None = None,
        key: str | None = None,
    ) -> Joined:
        """Takes the region's lease; raises Held, OlderCopy or SpecError when it may not."""
        body = Join(
            owner=owner,
            boot=boot,
            spec_digest=spec_digest,
            layout_digest=layout_digest,
            order=order,
            key=key,
        )
        return self._ask("POST", messages.join_path(region), Joined, body)

    def heartbeat(self, region: str, report: Heartbeat | Mapping[str, Any]) -> News:
        """Reports how the region is doing and returns what is new; raises FencedError."""
        if not isinstance(report, Heartbeat):
            report = parse(Heartbeat, json.dumps(report).encode())
        return self._ask("POST", messages.heartbeat_path(region), News, report)

    def calls(
        self, region: str, *, after: int, epoch: int, wait: float = LONG_POLL_SECONDS
    ) -> News | None:
        """Waits for news after number `after`; None when there is none for `wait` seconds."""
        path = messages.calls_path(region, after=after, epoch=epoch, wait=wait)
        return self._wait(path, News, wait)

    def latest(
        self, fragment: int, *, after: int = -1, wait: float = LONG_POLL_SECONDS
    ) -> Latest | None:
        """Waits for a version newer than `after`; None when there is none for `wait` seconds."""
        path = messages.fragment_path(fragment, after=after, wait=wait)
        return self._wait(path, Latest, wait)

    def status(self) -> Status:
        def receive(response: httpx.Response) -> Status:
            return Status.read(read(self.url, response, MOST_ANSWER_BYTES))

        return self._control.call("GET", messages.STATUS, receive, headers=self.headers())

    def stop(self) -> Stopping:
        """Asks for a graceful stop of the whole run."""
        return self._ask("POST", messages.STOP, Stopping)

    def amend(self, request: Amend) -> Amended:
        """Changes settings of the run; raises SpecError when it may not be."""
        return self._ask("POST", messages.AMENDMENTS, Amended, request)

    def amendments(self) -> Amendments:
        """Lists the amendments of the run."""
        return self._ask("GET", messages.AMENDMENTS, Amendments)

    # Bulk

    def submit(
        self,
        fragment: int,
        region: str,
        base: int,
        clock: int,
        frame: bytes | Path,
        *,
        epoch: int,
    ) -> Answer:
        """Uploads a contribution and returns the server's decision; retries have no effect."""
        path = messages.contribution_path(fragment, region, base, clock)
        headers = {**self.headers(), EPOCH_HEADER: str(epoch)}
        return self._transfer.send(path, frame, self.answer, headers=headers)

    def whole(self, fragment: int, version: int) -> Frame:
        """Fetches one version of a fragment; raises Gone when the server has dropped it."""
        size = self._size(fragment)

        def receive(data: memoryview) -> Frame:
            frame = open_frame(data, size=size)
            self._expect(frame, "whole", fragment, version)
            return frame

        path = messages.version_path(fragment, version)
        return self.fetch(path, receive, most=most_bytes(size))

    def chain(self, fragment: int, version: int, since: int) -> list[Frame] | None:
        """Fetches the deltas that lead from `since` to `version`.

        None when they are gone, or have more bytes than the whole version.
        """
        size = self._size(fragment)

        def receive(data: memoryview) -> list[Frame]:
            frames = read_chain(data, size=size)
            if [frame.header.version for frame in frames] != [*range(since + 1, version + 1)]:
                raise WireError(
                    f"{self.url} sent {len(frames)} deltas for the way from version {since} "
                    f"to {version} of fragment {fragment}."
                )
            for frame in frames:
                self._expect(frame, "delta", fragment, frame.header.version)
            return frames

        path = messages.version_path(fragment, version, since=since)
        try:
            return self.fetch(path, receive, most=(version - since) * most_bytes(size))
        except Gone:
            return None

    def weights(
        self, out: Path, *, version: int | None = None, ema: bool = False
    ) -> dict[str, str]:
        """Writes the whole model to `out` as safetensors and returns the file's metadata.

        With `ema` it is the average of the published weights that the run keeps.
        The file appears under its name only when it is complete and readable.
        """
        size = 4 * sum((self._run or self.run()).fragments)
        draft = out.with_name(out.name + ".draft")
        headers, begin = self.headers(), 0

        def receive(response: httpx.Response) -> dict[str, str]:
            nonlocal begin
            resumed = response.status_code == 206
            with draft.open("r+b" if resumed else "wb") as file:
                file.truncate(file.seek(begin if resumed else 0))
                try:
                    for piece in response.iter_raw():
                        file.write(piece)
                finally:
                    # The next try resumes here; if the weights have changed by then, the server
                    # sends them from the beginning. One byte again, since a try may break after
                    # the last one, and no server sends a range without bytes.
                    begin = max(0, file.tell() - 1)
                    if etag := response.headers.get("etag", ""):
                        headers.update({"range": f"bytes={begin}-", "if-range": etag})
            try:
                return _metadata(draft)
            except WireError:
                headers.pop("range", None)
                raise

        try:
            metadata = self._transfer.lane(0).call(
                "GET",
                messages.weights_path(version, ema=ema),
                receive,
                headers=headers,
                seconds=self.down.seconds(size),
            )
            sync_file(draft)
            draft.replace(out)
            sync_folder(out.parent)
            return metadata
        except OSError as error:
            raise StoreError(
                f"{out} cannot be written: {error.strerror}.", hint="Choose another --out."
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    # Shared

    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        run = {RUN_HEADER: self._run_id} if self._run_id else {}
        return {**run, WIRE_HEADER: str(WIRE_VERSION)}

    def _ask(self, method: str, path: str, kind: type[M], body: Message | None = None) -> M:
        return self._control.call(
            method,
            path,
            lambda response: parse(kind, read(self.url, response, MOST_ANSWER_BYTES)),
            body=body.body() if body else None,
            headers={**self.headers(), **JSON},
        )

    def _wait(self, path: str, kind: type[M], wait: float) -> M | None:
        def receive(response: httpx.Response) -> M | None:
            body = read(self.url, response, MOST_ANSWER_BYTES)
            return None if response.status_code == 204 else parse(kind, body)

        # A server that does not know `wait` answers after its own time.
        seconds = max(wait, LONG_POLL_SECONDS) + self.timeouts.answer
        return self._control.call("GET", path, receive, headers=self.headers(), seconds=seconds)

    def answer(self, response: httpx.Response) -> Answer:
        """Parses the server's decision on a contribution."""
        body = read(self.url, response, MOST_ANSWER_BYTES)
        if response.is_success:
            return parse(Answer, body)
        error, fields = parse_error(body) or (None, {})
        if error is None or "fate" not in fields:
            raise refusal(self.url, response.status_code, body)
        return parse(Answer, json.dumps({"why": error.message, **fields}).encode())

    def fetch(self, path: str, receive: Callable[[memoryview], T], *, most: int) -> T:
        """Fetches bytes that never change; what `receive` refuses is fetched again."""
        return self._transfer.fetch(path, receive, most=most, headers=self.headers())

    def lane(self, number: int) -> Connection:
        """One of the connections for bodies."""
        return self._transfer.lane(number)

    def _size(self, fragment: int) -> int:
        sizes = (self._run or self.run()).fragments
        if not 0 <= fragment < len(sizes):
            raise Gone(f"There is no fragment {fragment}; the run has {len(sizes)}.")
        return sizes[fragment]

    def _expect(self, frame: Frame, kind: str, fragment: int, version: int) -> None:
        run, header = self._run or self.run(), frame.header
        received = (header.kind, header.run, header.layout, header.fragment, header.version)
        if received != (kind, run.run, run.layout_digest, fragment, version):
            raise WireError(
                f"{self.url} sent a {header.kind} of fragment {header.fragment}, version "
                f"{header.version} of run {header.run}, where a {kind} of fragment {fragment}, "
                f"version {version} of run {run.run} was asked for."
            )


def _metadata(file: Path) -> dict[str, str]:
    """Returns a weights file's metadata, or refuses a file that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise WireError(f"The weights arrived damaged: {error}.") from None
