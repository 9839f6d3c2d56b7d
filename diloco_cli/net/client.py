"""Everything one may ask a server, as typed calls.

    control (short, waiting)   run, join, heartbeat, calls, latest, status, stop, events
    bulk (frames, weights)     submit, whole, chain, weights

A refusal by the server becomes an exception with the server's own words and hint. What
the protocol treats as an answer is returned as one: the fate of a contribution is an
`Answer`, no news within the waiting time is None, and so is a chain the server no longer has.

Long bodies travel in parts and ranges over several connections and go on where they broke
off. Control calls have a connection of their own, so that they never wait behind a body.

A `Client` keeps its connections to itself: use one in each thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from diloco_cli.errors import StoreError, WireError
from diloco_cli.net.connection import Carrier, Connection, Retry, Timeouts
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.refusal import FencedError, Gone, Held, OlderCopy, other_wire, read, refusal
from diloco_cli.net.transfer.bodies import Transfer
from diloco_cli.net.transfer.throughput import MOST_LANES, PART_BYTES
from diloco_cli.wire import messages
from diloco_cli.wire.frame import Frame, most_bytes, open_frame, read_chain
from diloco_cli.wire.messages import (
    EPOCH_HEADER,
    LONG_POLL_SECONDS,
    RUN_HEADER,
    WIRE_HEADER,
    WIRE_VERSION,
    Answer,
    Heartbeat,
    Join,
    Joined,
    Latest,
    Message,
    News,
    Run,
    parse,
    parse_error,
)

__all__ = ["Client", "FencedError", "Gone", "Held", "OlderCopy"]

M = TypeVar("M", bound=Message)
T = TypeVar("T")

MOST_ANSWER_BYTES = 16 << 20
"""The longest JSON document that is read; a status of thousands of regions is shorter."""

JSON = {"content-type": "application/json"}


class Client:
    """The aggregation server at `url`."""

    def __init__(
        self,
        url: str,
        *,
        run: str = "",
        stop: threading.Event | None = None,
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
        carrier: Carrier = "pyreqwest",
        control: Carrier = "httpx",
        part_bytes: int = PART_BYTES,
        lanes: int = MOST_LANES,
        rate_limit: float | None = None,
        say: Callable[[str], None] | None = None,
        identity: Credentials = NOBODY,
    ) -> None:
        """Opens no connection yet. `run` is the run's id; `run()` learns it when left out.

        Bodies longer than `part_bytes` travel over up to `lanes` connections. `rate_limit` is
        the most that uploads may take, in bits a second. `say` is told what is derived from
        the first measurement of the link. `control` carries the short calls: httpx is there
        sooner, pyreqwest takes half the processor time for each.
        """
        self.timeouts = timeouts or Timeouts()
        self._run_id = run
        self._about: Run | None = None
        options: dict[str, Any] = {"timeouts": self.timeouts, "retry": retry, "stop": stop}
        options["identity"] = identity
        self._control = Connection(url, bulk=control == "pyreqwest", carrier=control, **options)
        self._freight = Transfer(
            url,
            carrier=carrier,
            part_bytes=part_bytes,
            lanes=lanes,
            rate_limit=rate_limit,
            say=say,
            **options,
        )
        self.up, self.down = self._freight.up, self._freight.down
        """What is known about the link in each direction."""
        self.url = self._control.url

    def close(self) -> None:
        self._control.close()
        self._freight.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Control

    def run(self) -> Run:
        """Says which run this is and what every region must share."""
        about = self._ask("GET", messages.RUN, Run)
        if about.wire != WIRE_VERSION:
            raise other_wire(self.url, about.wire)
        self._run_id = self._run_id or about.run
        self._about = about
        return about

    def join(
        self, region: str, *, owner: str, boot: int, spec_digest: str, layout_digest: str
    ) -> Joined:
        """Takes the region's lease; raises Held, OlderCopy or SpecError when it may not."""
        asked = Join(owner=owner, boot=boot, spec_digest=spec_digest, layout_digest=layout_digest)
        return self._ask("POST", messages.join_path(region), Joined, asked)

    def heartbeat(self, region: str, report: Heartbeat | Mapping[str, Any]) -> News:
        """Reports how the region is doing and returns what is new; raises Fenced."""
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

    def status(self) -> dict[str, Any]:
        return self._document("GET", messages.STATUS)

    def stop(self) -> dict[str, Any]:
        """Asks for a graceful stop of the whole run."""
        return self._document("POST", messages.STOP)

    def events(self, *, after: str = "", silence: float = 60.0) -> Iterator[dict[str, Any]]:
        """Yields the run's events as they happen, each with its `id`, after the one named.

        Ends with LinkError when the server is silent for longer than `silence` seconds.
        """
        headers = {**self.headers(), "accept": "text/event-stream"}
        if after:
            headers["last-event-id"] = after
        told: dict[str, str] = {}
        for line in self._control.stream(messages.EVENTS, headers=headers, silence=silence):
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line and "data" in told:
                yield {**json.loads(told.pop("data")), "id": told.get("id", "")}
            elif key == "data" and key in told:
                told[key] += "\n" + value
            elif key in ("id", "data"):
                told[key] = value

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
        """Hands over a contribution, once however often it is tried, and returns its fate."""
        path = messages.contribution_path(fragment, region, base, clock)
        headers = {**self.headers(), EPOCH_HEADER: str(epoch)}
        return self._freight.send(path, frame, self.answer, headers=headers)

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

    def weights(self, out: Path, *, version: int | None = None) -> dict[str, str]:
        """Writes the whole model to `out` as safetensors and returns the file's metadata.

        The file appears under its name only when it is complete and readable.
        """
        size = 4 * sum((self._about or self.run()).fragments)
        draft = out.with_name(out.name + ".draft")
        headers = self.headers()

        def receive(response: httpx.Response) -> dict[str, str]:
            again = response.status_code == 206
            with draft.open("ab" if again else "wb") as file:
                try:
                    for piece in response.iter_raw():
                        file.write(piece)
                finally:
                    # The next try, should there be one, goes on here; if the weights are
                    # others by then, the server sends them from their beginning.
                    if etag := response.headers.get("etag", ""):
                        headers.update({"range": f"bytes={file.tell()}-", "if-range": etag})
            try:
                return _metadata(draft)
            except WireError:
                headers.pop("range", None)
                raise

        try:
            metadata = self._freight.lane(0).call(
                "GET",
                messages.weights_path(version),
                receive,
                headers=headers,
                seconds=self.down.seconds(size),
            )
            draft.replace(out)
            return metadata
        except OSError as error:
            raise StoreError(
                f"{out} cannot be written: {error.strerror}.", hint="Choose another --out."
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    # Shared

    def headers(self) -> dict[str, str]:
        """What every request carries."""
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
            said = read(self.url, response, MOST_ANSWER_BYTES)
            return None if response.status_code == 204 else parse(kind, said)

        # A server that does not know `wait` answers after its own time.
        seconds = max(wait, LONG_POLL_SECONDS) + self.timeouts.answer
        return self._control.call("GET", path, receive, headers=self.headers(), seconds=seconds)

    def _document(self, method: str, path: str) -> dict[str, Any]:
        def receive(response: httpx.Response) -> dict[str, Any]:
            said = read(self.url, response, MOST_ANSWER_BYTES)
            try:
                return dict(json.loads(said))
            except (ValueError, TypeError):
                raise WireError(f"{self.url}{path} did not answer with a JSON object.") from None

        return self._control.call(method, path, receive, headers=self.headers())

    def answer(self, response: httpx.Response) -> Answer:
        """Reads what became of a contribution."""
        said = read(self.url, response, MOST_ANSWER_BYTES)
        if response.is_success:
            return parse(Answer, said)
        error, beside = parse_error(said) or (None, {})
        if error is None or "fate" not in beside:
            raise refusal(self.url, response.status_code, said)
        return parse(Answer, json.dumps({"why": error.message, **beside}).encode())

    def fetch(self, path: str, receive: Callable[[memoryview], T], *, most: int) -> T:
        """Fetches bytes that never change; what `receive` refuses is fetched again."""
        return self._freight.fetch(path, receive, most=most, headers=self.headers())

    def lane(self, number: int) -> Connection:
        """One of the connections for bodies."""
        return self._freight.lane(number)

    def _size(self, fragment: int) -> int:
        sizes = (self._about or self.run()).fragments
        if not 0 <= fragment < len(sizes):
            raise Gone(f"There is no fragment {fragment}; the run has {len(sizes)}.")
        return sizes[fragment]

    def _expect(self, frame: Frame, kind: str, fragment: int, version: int) -> None:
        about = self._about or self.run()
        found = frame.header
        said = (found.kind, found.run, found.layout, found.fragment, found.version)
        if said != (kind, about.run, about.layout_digest, fragment, version):
            raise WireError(
                f"{self.url} sent a {found.kind} of fragment {found.fragment}, version "
                f"{found.version} of run {found.run}, where a {kind} of fragment {fragment}, "
                f"version {version} of run {about.run} was asked for."
            )


def _metadata(file: Path) -> dict[str, str]:
    """Returns a weights file's metadata, or refuses a file that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise WireError(f"The weights arrived damaged: {error}.") from None
