"""What a refusal by the server means: one exception for each thing the client can do about it.

412                       FencedError  stop training, join again
409 held, too-soon        Held         wait, join again
403 retired               Dismissed    leave: the region was removed from the run
409 older-copy            OlderCopy    take a new owner id, join again
409 …, 401, 403           SpecError    another run or spec, or no permission: a person must look
404, 410                  Gone         take something newer
426                       WireError    update one side
400, 413, 422             WireError    these bytes are wrong
anything else             LinkError    not a diloco server, or not now
"""

from __future__ import annotations

import httpx

from diloco_cli.errors import DilocoError, LinkError, SpecError, StoreError, WireError
from diloco_cli.net.backends import PIECES
from diloco_cli.wire.error_bodies import parse_error
from diloco_cli.wire.messages import (
    WIRE_HEADER,
    WIRE_VERSION,
)

MOST_REFUSAL_BYTES = 1 << 20


class FencedError(DilocoError):
    """Another worker holds this region's lease now; stop training and join again."""


class Held(DilocoError):
    """Another worker holds the region's lease; ask again after `retry_seconds`."""

    def __init__(self, message: str, *, hint: str | None, retry_seconds: float) -> None:
        super().__init__(message, hint=hint)
        self.retry_seconds = retry_seconds


class Dismissed(SpecError):
    """The region was removed from the run; it may join again when it is added again."""


class OlderCopy(DilocoError):
    """The folder is an older copy of one that has joined since; it needs a new owner id."""


class Gone(SpecError):
    """The server does not have, or no longer has, what was asked for."""


def read(url: str, response: httpx.Response, most: int) -> bytes:
    """Reads a body that must not be longer than `most` bytes."""
    pieces, length = [], 0
    for piece in response.extensions.get(PIECES, response.iter_raw)():
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise WireError(
                f"{url} sends more than the {most} bytes its answer may have.",
                hint="Is this a diloco server of the same run?",
            )
    return b"".join(pieces)


def refusal(url: str, status: int, body: bytes) -> DilocoError:
    """Says what an answer that is not a success means."""
    parsed = parse_error(body)
    if status == 426 and (parsed is None or "wire" in parsed[1]):
        return other_wire(url, parsed[1]["wire"] if parsed else None)
    if parsed is None:
        return LinkError(
            f"{url} answered {status} in words that are not a diloco server's.",
            hint="Is this the server's own address? A proxy may be answering in its place.",
        )
    error, fields = parsed
    message, hint = error.message, error.hint
    if status == 412:
        return FencedError(message, hint=hint)
    if status == 403 and error.code == "retired":
        return Dismissed(message, hint=hint)
    if status == 409 and error.code in ("held", "too-soon"):
        seconds = fields.get("retry_seconds")
        return Held(message, hint=hint, retry_seconds=_positive(seconds, otherwise=1.0))
    if status == 409 and error.code == "older-copy":
        return OlderCopy(message, hint=hint)
    if status == 409 and error.code == "server-behind":
        return StoreError(message, hint=hint)
    if status in (401, 403, 409) or error.code == "not-amendable":
        return SpecError(message, hint=hint)
    if status in (404, 410):
        return Gone(message, hint=hint)
    if 400 <= status < 500:
        return WireError(message, hint=hint)
    failure = LinkError(f"{url} answered {status}: {message}", hint=hint)
    failure.answered = True
    return failure


def other_wire(url: str, theirs: object) -> WireError:
    """The two sides speak different versions."""
    version = f"wire version {theirs}" if theirs is not None else "another wire version"
    return WireError(
        f"{url} speaks {version}, this program wire version {WIRE_VERSION} (`{WIRE_HEADER}`).",
        hint="Update the older side; a server is updated first.",
    )


def _positive(value: object, *, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else otherwise
