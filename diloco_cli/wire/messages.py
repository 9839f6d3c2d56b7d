"""What client and server exchange besides frames: routes, HTTP headers, JSON bodies.

Both sides use these types, so a key exists once. Requests are checked to the letter,
unknown keys included: they come from strangers. Answers may carry keys that this version
does not know, because a server is updated before its workers.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlencode

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from diloco_cli.core.budget import MOST_TOKENS
from diloco_cli.core.lanes import MOST_LANES
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
MOST_HOSTS = 4096
LONG_POLL_SECONDS = 20.0
"""A waiting GET is answered with 204 after this long, so that proxies keep the line open."""

Fate = Literal["pending", "merged", "returned", "refused", "foreign"]
FATES: tuple[Fate, ...] = ("pending", "merged", "returned", "refused", "foreign")

Count = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]
Version = Annotated[int, Field(strict=True, ge=-1, le=2**53 - 1)]
"""A fragment's version; −1 means none yet."""
Amount = Annotated[float, Field(strict=True, ge=-1.0, le=MOST_TOKENS)]
"""Tokens or steps: never below zero, but for what rounding leaves of a difference."""
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9)]
Number = Annotated[float, Field(strict=True)]
Progress = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
MOST_LETTERS = 1000
Text = Annotated[str, Field(max_length=MOST_LETTERS)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
JsonObject = dict[str, Any]
"""Keys and values as JSON has them."""
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


def _plain(value: JsonObject) -> JsonObject:
    # NaN could be read, but not be written down again: JSON has no word for it.
    json.dumps(value, allow_nan=False)
    return value


PlainJson = Annotated[JsonObject, AfterValidator(_plain)]


class Changes(Message):
    """What an amendment changes."""

    set: PlainJson = {}
    """By dotted key, as in `sync.quorum`; null takes a key back to its default."""
    add: tuple[PlainJson, ...] = ()
    """Regions, as the spec lists them."""
    remove: tuple[Text, ...] = ()
    """Names of regions."""
    repace: tuple[Text, ...] = ()
    """Names of regions whose pace is learnt anew."""


class Amend(Changes, Request):
    """POST /v1/amendments: a change of a run that has begun."""

    id: Id
    """Drawn once for each command: the same request again is answered, not made again."""
    after: Count | None = None
    """Number of the terms that the change was made for; the newest when left out."""
    why: Text = ""
    undo: Count | None = None
    """Take this amendment back, instead of `set`, `add`, `remove` and `repace`."""
    sure: Flag = False
    """Make it although it ends the run."""
    dry_run: Flag = False
    """Only say what it would change, and when."""


class Amendment(Changes):
    """A change of the run that is on record."""

    number: Count
    id: Id
    by: Text = ""
    why: Text = ""
    time: float | None = None
    """Seconds since 1970."""
    reopens: Flag = False


class AmendedKey(Message):
    """One key that an amendment changes, and when that takes effect."""

    key: str
    before: Any = None
    after: Any = None
    when: str


class Amended(Message):
    """What became of an amendment."""

    terms: Count
    """Number of the newest terms."""
    changes: tuple[AmendedKey, ...] = ()
    recorded: Flag = False
    """It had been made before."""
    reopens: Flag = False
    ends: Flag = False
    """The budget is used up under these terms."""


class Amendments(Message):
    """GET /v1/amendments."""

    terms: Count
    amendments: tuple[Amendment, ...]


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
    settings: PlainJson
    """What every region shares under the newest terms."""
    digests: tuple[Digest, ...] = ()
    """Of the shared settings of every terms the run has had; a region may come with any."""
    amendments: tuple[Amendment, ...] = ()
    """In order; the n-th leads to terms n."""
    was: tuple[Id, ...] = ()
    """Runs that this one replaced before they had trained anything: their regions begin anew."""
    continues: tuple[Id, ...] = ()
    """Runs that this one goes on from after a loss of the server's disk: their regions realign."""


LaneNumber = Annotated[int, Field(strict=True, ge=0, lt=MOST_LANES)]
LaneCount = Annotated[int, Field(strict=True, ge=1, le=MOST_LANES)]
LanePositions = Annotated[dict[LaneNumber, tuple[Count, Count]], Field(max_length=MOST_LANES)]
"""By lane: under which grant, and the first position that is not read."""


class TextOrder(Request):
    """How a region reads which text; equal digests mean that they divide it."""

    digest: VectorDigest
    settings: VectorDigest
    """Equal where only the files differ."""
    tokens: Count
    """Of the training part."""
    windows: Count
    """In one epoch."""
    sequence: Annotated[int, Field(strict=True, ge=1, le=2**40)]
    lanes: LaneCount

    @model_validator(mode="after")
    def _every_lane_has_windows(self) -> Self:
        if self.windows < self.lanes:
            raise ValueError(f"has {self.windows} windows for {self.lanes} lanes")
        return self


class TextCursor(Request):
    """Where a region's reading stands."""

    order: TextOrder
    count: LaneCount
    """Lanes of the order as the region knows it."""
    lanes: LanePositions
    released: LanePositions = {}
    """Given up by a checkpoint that is durable."""


class LaneAssignment(Message):
    """What a region reads, as the server has it on record."""

    order: VectorDigest
    count: LaneCount
    lanes: LanePositions
    """All that the region owns, and from where each is read."""
    asked: tuple[LaneNumber, ...] = ()
    """Those of them that it should give up."""


class Join(Request):
    owner: Id
    """Random id of the region's folder."""
    boot: Count
    """How often an agent was started on that folder."""
    spec_digest: Digest
    layout_digest: Digest
    order: TextOrder | None = None
    """None if the text cannot be read here."""
    wire: Count = WIRE_VERSION
    key: Id | None = None
    """Random, of the region's folder. Where anybody may join, the first who comes under a name
    has it, and later joins must show the same key."""


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
    ended: Count = 0
    """Number of the record that called the end, for a drained region to name; 0 before."""
    until: Amount | None = None
    """Make no inner step once this region has trained so many tokens; None says nothing new."""
    finished: Flag
    stop: Flag
    evaluate: Flag
    """This region evaluates the held-out loss of the global weights."""
    ema: Flag = False
    """The run keeps an average of its published weights, to be evaluated as well."""
    lease_seconds: Seconds
    terms: Count = 0
    """Number of the newest terms; `GET /v1/run` has the amendments that lead to them."""
    progress: Progress | None = None
    """Tokens of the run, trained by anybody ÷ its budget; None says nothing new."""
    merged: Amount | None = None
    """Tokens of all regions that are in the published weights; None says nothing new."""
    every: Count = 0
    """Inner steps between two exchanges of one fragment, under the newest terms."""
    lanes: LaneAssignment | None = None
    """None while the server does not know which text the region reads."""
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


class HostTimes(Request):
    """One host of a region that has several."""

    host: Count
    work_seconds: Seconds
    """What it takes for the work that all hosts are timed by, without the others."""
    step_seconds: Seconds
    """What an inner step would take if every host were like this one."""


class HeldOut(Request):
    versions: tuple[Version, ...]
    loss: Number


class TextSample(Request):
    """What published weights write after the beginning of a held-out text."""

    versions: tuple[Version, ...]
    prompt: Text
    text: Text


class Divergence(Request):
    """Work that a trainer gave up as unfit, again and again, since work of it was merged."""

    times: Count
    """In a row."""
    tokens: Amount
    step: Count
    """Its step when that began."""
    seconds: Seconds
    """Since then."""
    published: Flag
    """Before the last time not one step was sound: it began with the published weights."""
    why: Text

    def in_words(self) -> str:
        """What is to be said of a region that this is about."""
        return (
            f"its work is thrown away, {self.times} times in a row since step {self.step} "
            f"({self.tokens:,.0f} tokens): {self.why}"
        )


def _known(loss: Any) -> Any:
    return None if isinstance(loss, float) and not math.isfinite(loss) else loss


class TrainerProgress(Request):
    """How far a trainer has come: its progress.json, and what a heartbeat passes on of it."""

    step: Count
    training: Flag
    ended: Count
    """Number of the end that it was drained after: it holds nothing any more; 0 if it may."""
    fragments: tuple[FragmentProgress, ...]
    tokens: Tokens
    loss: Annotated[Number | None, BeforeValidator(_known)] = None
    """Of the last inner step; none that is not finite, so that a diverging region stays heard."""
    tokens_per_second: Annotated[float, Field(strict=True, ge=0)] = 0.0
    devices: Annotated[int, Field(strict=True, ge=1)] = 1
    tflops: Annotated[float, Field(strict=True, ge=0)] | None = None
    """Tera-operations per second of one device, from the shapes of the model."""
    mfu: Annotated[float, Field(strict=True, ge=0)] | None = None
    """Share of what a device of this kind can do at best; none of a kind that is not known."""
    device_memory: Count | None = None
    """Bytes in use on the fullest device; none where devices do not say."""
    learning_rate: Annotated[Number | None, BeforeValidator(_known)] = None
    gradient_norm: Annotated[Number | None, BeforeValidator(_known)] = None
    """Of a late inner step, before clipping; none of both where the trainer does not say."""
    step_seconds: Seconds = 0.0
    hosts: Annotated[tuple[HostTimes, ...], Field(max_length=MOST_HOSTS)] = ()
    """Of a region that has several: how fast each is by itself."""
    worked: Seconds = 0.0
    """In inner steps, since the region began."""
    blocked: Seconds = 0.0
    """Between inner steps, by mail, new versions and waiting for them, since the region began."""
    lost: Amount = 0.0
    """Tokens trained and lost with a trainer that died, since the region began."""
    lost_with_server: Amount = 0.0
    """Of the discarded: what was merged in versions that went with the last server's disk."""
    pace: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """Tokens per second when nothing is wrong."""
    why: Text = ""
    heldout: HeldOut | None = None
    heldout_ema: HeldOut | None = None
    """Of the run's average of its published weights, as of these versions."""
    sample: TextSample | None = None
    reading: TextCursor | None = None
    divergence: Divergence | None = None

    @classmethod
    def none(cls, fragments: int) -> TrainerProgress:
        """What is known of a trainer that has not reported yet."""
        zeros = (0.0,) * fragments
        return cls(
            step=0,
            training=False,
            ended=0,
            fragments=(FragmentProgress(version=-1, steps=0.0),) * fragments,
            tokens=Tokens(
                trained=zeros, applied=zeros, pending=zeros, refused=zeros, discarded=zeros
            ),
        )


class Heartbeat(TrainerProgress):
    epoch: Count
    n: Count = 0
    """Counts the heartbeats of an epoch; one that comes after a later one only renews the lease."""
    until: Amount | None = None
    """How far the region may train, as its agent was last told."""
    stopping: Flag
    retiring: Flag = False
    """It trains no more and leaves for good when what it holds is merged; with `stopping`, now."""
    restarts: Count = 0
    terms: Count = 0
    """Number of the terms that the region's trainer works under."""
    images: dict[Count, Holding] = {}
    """What the region's agent has of each fragment; none of what it does not have yet."""
    mended: Count = 0
    """Images with other bits than were published, replaced since the agent was started."""
    link_up: Amount | None = None
    """Bytes per second that uploads were measured at; none before the first."""
    link_down: Amount | None = None


def parse_heartbeat(data: bytes, *, fragments: int) -> Heartbeat:
    """Reads a heartbeat whose every list has one entry per fragment."""
    heartbeat = parse(Heartbeat, data)
    lists: dict[str, tuple[Any, ...]] = {
        "fragments": heartbeat.fragments,
        **{f"tokens.{fate}": getattr(heartbeat.tokens, fate) for fate in Tokens.model_fields},
    }
    if heartbeat.heldout:
        lists["heldout.versions"] = heartbeat.heldout.versions
    for key, entries in lists.items():
        if len(entries) != fragments:
            raise WireError(
                f"The heartbeat is wrong: `{key}` has {len(entries)} entries, "
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
    counted: dict[str, Amount] = {}
    """Tokens merged and counted so far, by region."""
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


class Stopping(Message):
    """POST /v1/stop: the run is being stopped."""

    state: Text
    run: Text = ""


class Having(Message):
    """GET …/parts: what the server has of a frame."""

    have: tuple[tuple[Count, Count], ...]
    """Ranges of bytes, as (start, stop), in order, apart from each other."""
    decided: Flag = False
    """The frame needs no more bytes: its fate is on record."""


# Routes. Servers match the patterns; clients build the paths.

RUN = "/v1/run"
STATUS = "/v1/status"
STOP = "/v1/stop"
AMENDMENTS = "/v1/amendments"
EVENTS = "/v1/events"
HISTORY = "/v1/history"
WEIGHTS = "/v1/weights"
JOIN = "/v1/regions/{region}/join"
HEARTBEAT = "/v1/regions/{region}/heartbeat"
CALLS = "/v1/regions/{region}/calls"
CONTRIBUTION = "/v1/fragments/{fragment:number}/contributions/{region}/{base:number}-{clock:number}"
PARTS = f"{CONTRIBUTION}/parts"
PART = f"{PARTS}/{{start:number}}"
FRAGMENT = "/v1/fragments/{fragment:number}"
VERSION = "/v1/fragments/{fragment:number}/versions/{version:number}"


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


def weights_path(version: int | None = None, *, ema: bool = False) -> str:
    asked = {"version": version} if version is not None else {"ema": 1} if ema else {}
    return f"{WEIGHTS}?{urlencode(asked)}" if asked else WEIGHTS
