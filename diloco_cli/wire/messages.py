"""What client and server exchange besides frames: routes, HTTP headers, JSON bodies.

Both sides use these types, so a key exists once. Requests are checked to the letter,
unknown keys included: they come from strangers. Answers may carry keys that this version
does not know, because a server is updated before its workers.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlencode

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from diloco_cli.errors import WireError
from diloco_cli.validation import in_words

WIRE_VERSION = 1
"""Of the API and of the frames that travel over it; both sides must have the same."""

RUN_HEADER = "diloco-run"
WIRE_HEADER = "diloco-wire"
EPOCH_HEADER = "diloco-epoch"
PARTS_HEADER = "diloco-parts"
"""On a PUT without a body: the digest of the frame whose parts the server has."""

MOST_JSON_BYTES = 1 << 20
LONG_POLL_SECONDS = 20.0
"""A waiting GET is answered with 204 after this long, so that proxies keep the line open."""

Fate = Literal["pending", "merged", "returned", "refused", "foreign"]
FATES: tuple[Fate, ...] = ("pending", "merged", "returned", "refused", "foreign")

Count = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]
Version = Annotated[int, Field(strict=True, ge=-1, le=2**53 - 1)]
"""A fragment's version; −1 means none yet."""
Amount = Annotated[float, Field(strict=True, ge=-1.0, le=2**53 - 1)]
"""Tokens or steps: never below zero, but for what rounding leaves of a difference."""
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(max_length=1000)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
VectorDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def body(self) -> bytes:
        """Writes the message as JSON."""
        return self.model_dump_json().encode()


class Request(Message):
    model_config = ConfigDict(extra="forbid")


M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Reads a message that may say anything, or names the first key that is wrong."""
    name = kind.__name__.lower()
    if len(data) > MOST_JSON_BYTES:
        raise WireError(f"A {name} of {len(data)} bytes is too long; {MOST_JSON_BYTES} may be.")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise WireError(
            f"The {name} is wrong: {fault(error, known=list(kind.model_fields))}.",
            hint="The two sides run different programs or versions; compare `diloco --version`.",
        ) from None


def fault(error: ValidationError, *, known: list[str] | None = None) -> str:
    """Says the first thing that is wrong."""
    first = error.errors()[0]
    key = ".".join(str(step) for step in first["loc"])
    if first["type"] == "string_pattern_mismatch":
        return f"`{key}` does not look like one: {str(first['input'])[:80]!r}"
    message, _ = in_words(first, known or [])
    return f"`{key}` {message}" if key else message


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    # NaN could be read, but not be written down again: JSON has no word for it.
    json.dumps(found, allow_nan=False)
    return found


class Run(Message):
    """GET /v1/run: what every region must share."""

    run: Id
    name: Text
    state: Text
    spec_digest: Digest
    layout_digest: Digest
    wire: Count
    fragments: tuple[Annotated[int, Field(strict=True, ge=1, le=2**40)], ...]
    """Size of each fragment."""
    lease_seconds: Seconds
    settings: Annotated[dict[str, Any], AfterValidator(_plain)]


class Join(Request):
    owner: Id
    """Random id of the region's folder."""
    boot: Count
    """How often an agent was started on that folder."""
    spec_digest: Digest
    layout_digest: Digest
    wire: Count = WIRE_VERSION


class Decided(Message):
    """The last decision on a region's frames of one fragment."""

    digest: Digest
    fate: Fate
    why: Text = ""


class News(Message):
    n: Count
    """Number of the last thing that happened; wait for more with it."""
    versions: tuple[Version, ...]
    """Newest published version of each fragment."""
    calls: dict[Count, Version]
    """Fragments this region is asked to contribute now: {fragment: version}."""
    fates: dict[Count, Decided]
    end: Flag
    """Make no more inner steps; contribute what is held."""
    finished: Flag
    stop: Flag
    evaluate: Flag
    """This region evaluates the held-out loss of the global weights."""
    lease_seconds: Seconds
    mend: dict[Count, VectorDigest] = {}
    """Digests this region reported and the server never published: fetch those fragments whole."""


class Joined(News):
    epoch: Count
    high: Version
    """Largest clock ever decided for this region, or −1."""


class FragmentProgress(Request):
    version: Version
    steps: Amount
    """Inner steps held and not in flight."""


class Tokens(Request):
    """Tokens by fate, one number per fragment."""

    trained: tuple[Amount, ...]
    applied: tuple[Amount, ...]
    pending: tuple[Amount, ...]
    refused: tuple[Amount, ...]
    discarded: tuple[Amount, ...]


class Holding(Request):
    """The published weights of one fragment, as a region has them."""

    version: Version
    digest: VectorDigest


class HeldOut(Request):
    versions: tuple[Version, ...]
    loss: Number


def _known(loss: Any) -> Any:
    return None if isinstance(loss, float) and not math.isfinite(loss) else loss


class TrainerProgress(Request):
    """How far a trainer has come: its progress.json, and what a heartbeat passes on of it."""

    step: Count
    training: Flag
    drained: Flag
    fragments: tuple[FragmentProgress, ...]
    tokens: Tokens
    loss: Annotated[Number | None, BeforeValidator(_known)] = None
    """Of the last inner step; none that is not finite, so that a diverging region stays heard."""
    tokens_per_second: Annotated[float, Field(strict=True, ge=0)] = 0.0
    step_seconds: Seconds = 0.0
    worked: Seconds = 0.0
    """In inner steps, since the region began."""
    blocked: Seconds = 0.0
    """Between inner steps, by mail, new versions and waiting for them, since the region began."""
    lost: Amount = 0.0
    """Tokens trained and lost with a trainer that died, since the region began."""
    pace: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """Tokens per second when nothing is wrong."""
    why: Text = ""
    heldout: HeldOut | None = None

    @classmethod
    def none(cls, fragments: int) -> TrainerProgress:
        """What is known of a trainer that has not reported yet."""
        zeros = (0.0,) * fragments
        return cls(
            step=0,
            training=False,
            drained=False,
            fragments=(FragmentProgress(version=-1, steps=0.0),) * fragments,
            tokens=Tokens(
                trained=zeros, applied=zeros, pending=zeros, refused=zeros, discarded=zeros
            ),
        )


class Heartbeat(TrainerProgress):
    epoch: Count
    stopping: Flag
    restarts: Count = 0
    images: dict[Count, Holding] = {}
    """What the region's agent has of each fragment; none of what it does not have yet."""
    mended: Count = 0
    """Images with other bits than were published, replaced since the agent was started."""


def parse_heartbeat(data: bytes, *, fragments: int) -> Heartbeat:
    """Reads a heartbeat whose every list has one entry per fragment."""
    heartbeat = parse(Heartbeat, data)
    lists: dict[str, tuple[Any, ...]] = {
        "fragments": heartbeat.fragments,
        **{f"tokens.{fate}": getattr(heartbeat.tokens, fate) for fate in Tokens.model_fields},
    }
    if heartbeat.heldout:
        lists["heldout.versions"] = heartbeat.heldout.versions
    for key, found in lists.items():
        if len(found) != fragments:
            raise WireError(
                f"The heartbeat is wrong: `{key}` has {len(found)} entries, "
                f"the run has {fragments} fragments.",
                hint="Was the worker started with this run's spec?",
            )
    return heartbeat


class Links(Message):
    whole: str
    delta: str | None = None


class Latest(Message):
    """GET /v1/fragments/{f}: the newest version of a fragment."""

    fragment: Count
    version: Version
    members: tuple[str, ...]
    merged: dict[str, Digest]
    published: str
    links: Links


class Answer(Message):
    """What became of a contribution."""

    fate: Fate
    why: str = ""
    merged: str = ""
    """Digest of the region's last merged frame, as the server has it."""
    recorded: Flag = False
    """The server had decided before and says so again."""


class Having(Message):
    """GET …/parts: what the server has of a frame."""

    have: tuple[tuple[Count, Count], ...]
    """Ranges of bytes, as (start, stop), in order, apart from each other."""
    decided: Flag = False
    """The frame needs no more bytes: its fate is on record."""


def error_body(code: str, message: str, hint: str | None = None, **beside: Any) -> dict[str, Any]:
    """Builds the body of an error; `beside` are the keys next to `error`."""
    return {"error": {"code": code, "message": message, "hint": hint}, **beside}


class Refusal(BaseModel):
    """The inside of an error body."""

    code: str
    message: str
    hint: str | None = None


def parse_error(data: bytes) -> tuple[Refusal, dict[str, Any]] | None:
    """Reads (error, keys beside it), or None when these bytes are not an error of ours."""
    try:
        found = json.loads(data)
        return Refusal.model_validate(found.pop("error")), found
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


# Routes. Servers match the patterns; clients build the paths.

RUN = "/v1/run"
STATUS = "/v1/status"
STOP = "/v1/stop"
EVENTS = "/v1/events"
WEIGHTS = "/v1/weights"
JOIN = "/v1/regions/{region}/join"
HEARTBEAT = "/v1/regions/{region}/heartbeat"
CALLS = "/v1/regions/{region}/calls"
CONTRIBUTION = "/v1/fragments/{fragment:int}/contributions/{region}/{base:int}-{clock:int}"
PARTS = f"{CONTRIBUTION}/parts"
PART = f"{PARTS}/{{start:int}}"
FRAGMENT = "/v1/fragments/{fragment:int}"
VERSION = "/v1/fragments/{fragment:int}/versions/{version:int}"


def join_path(region: str) -> str:
    return f"/v1/regions/{region}/join"


def heartbeat_path(region: str) -> str:
    return f"/v1/regions/{region}/heartbeat"


def calls_path(region: str, *, after: int, epoch: int, wait: float = LONG_POLL_SECONDS) -> str:
    query = urlencode({"after": after, "epoch": epoch, "wait": f"{wait:g}"})
    return f"/v1/regions/{region}/calls?{query}"


def contribution_path(fragment: int, region: str, base: int, clock: int) -> str:
    return f"/v1/fragments/{fragment}/contributions/{region}/{base}-{clock}"


def parts_path(contribution: str, *, frame: str) -> str:
    return f"{contribution}/parts?{urlencode({'frame': frame})}"


def part_path(contribution: str, start: int, *, size: int, frame: str, digest: str) -> str:
    query = urlencode({"size": size, "frame": frame, "digest": digest})
    return f"{contribution}/parts/{start}?{query}"


def check_value(crc: int) -> str:
    """A part's digest, as it is written in its path.

    It finds a part that was changed on its way, at once and for a tenth of the processor
    time of SHA-256; what the parts amount to is settled by the frame's own SHA-256.
    """
    return f"crc32:{crc:08x}"


def fragment_path(fragment: int, *, after: int = -1, wait: float = LONG_POLL_SECONDS) -> str:
    return f"/v1/fragments/{fragment}?{urlencode({'after': after, 'wait': f'{wait:g}'})}"


def version_path(fragment: int, version: int, *, since: int | None = None) -> str:
    path = f"/v1/fragments/{fragment}/versions/{version}"
    return path if since is None else f"{path}?from={since}"


def weights_path(version: int | None = None) -> str:
    return WEIGHTS if version is None else f"{WEIGHTS}?version={version}"
