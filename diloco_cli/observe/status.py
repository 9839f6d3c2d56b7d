"""The documents that say how a run is doing: one while it is served, one when it is over.

`Status` is what `GET /v1/status` answers and `diloco status --format json` prints, `Summary`
what `summary.json` holds, `LastKnown` what the run log tells when there is neither. The
server fills the first two (server/build_status.py); terminal, page, metrics and `diloco run`
read them. Key order is part of the documents.

Keys that a newer server adds are kept and passed on; anything else must be as it says here.
None always means: not known, or not yet.
"""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, ValidationError

from diloco_cli.errors import WireError
from diloco_cli.wire.messages import Amendment, JsonObject, Message, fault

ENDED = ("finished", "stopped")
STATES = ("waiting", "training", *ENDED)
"""What a server says of its run."""

Amount = int | float


class StatusDocument(Message):
    model_config = ConfigDict(extra="allow", strict=True)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Reads a document from JSON, or names the first key that is wrong."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise WireError(
                f"The {cls.__name__.lower()} is wrong: {fault(error)}.",
                hint="The server runs another program or version; compare `diloco --version`.",
            ) from None

    def plain(self) -> JsonObject:
        """As JSON objects, with only the keys that were given."""
        return self.model_dump(mode="json", exclude_unset=True)


class FragmentTokens(StatusDocument):
    """Tokens of one fragment, by what became of them."""

    trained: float
    applied: float
    uncounted: float
    """Merged beyond what a region's claims may count; see docs/concepts/tokens.md."""
    pending: float
    refused: float
    discarded: float


class RunTokens(StatusDocument):
    """Tokens of the run: each fragment's, averaged with the fragments' sizes."""

    budget: int
    trained: float
    applied: float
    uncounted: float
    """Merged beyond what a region's claims may count; see docs/concepts/tokens.md."""
    pending: float
    refused: float
    discarded: float
    given_up: float = 0.0
    """Of the discarded: held by regions when they were retired; pending again if they return."""
    repeated: float = 0.0
    """Read by a region after its lanes had gone to another, and merged all the same."""
    unread: float = 0.0
    """Read by a region that fell silent, and never merged: skipped in this epoch."""


class LossStatus(StatusDocument):
    """Losses in nats per token."""

    heldout: float | None = None
    """Of the global weights, when they were last evaluated."""
    train: float | None = None
    """Mean over regions of their last inner step."""
    first: float | None = None
    best: float | None = None
    heldout_at: int | None = None
    """Outer steps that the weights had when `heldout` was measured; the same for the others."""
    first_at: int | None = None
    best_at: int | None = None
    ema: float | None = None
    """Of the average of the published weights; None where `outer.ema` keeps none."""
    ema_at: int | None = None


class WireUse(StatusDocument):
    """What the frames of the run cost."""

    bits_per_parameter_up: float | None
    bits_per_parameter_down: float | None
    bytes_up: int
    bytes_down: int


class Goodputs(StatusDocument):
    """Which share of a fault-free run this one reached; docs/concepts/goodput.md defines each."""

    time: float | None = None
    tokens: float | None = None
    participation: float | None = None


class StartStatus(StatusDocument):
    """The weights that a run began with, where the seed did not make them."""

    source: str
    weights: str
    """Digest of the whole model's tensors."""
    momentum: str
    """`fresh` or `keep`."""


class RebuiltStatus(StatusDocument):
    """A run that goes on from what was left of one whose server was lost or set back."""

    continues: tuple[str, ...]
    """Ids of the runs before, oldest first."""
    lost: float
    """Tokens that had been merged and are lost with the last of them, as regions say."""
    awaited: tuple[str, ...]
    """Members that have not come yet: what they lost is not in the sum."""


class FragmentStatus(StatusDocument):
    fragment: int
    version: int
    phase: str
    waiting: tuple[str, ...]
    """Regions whose contribution waits for the round to close."""
    members: tuple[str, ...]
    """Regions in the newest version."""
    why: str


class HostStatus(StatusDocument):
    """One host of a region that has several."""

    host: int
    work_seconds: float
    """What it takes for the work that all hosts are timed by, without the others."""
    step_seconds: float
    """What an inner step would take if every host were like this one."""


class DivergenceStatus(StatusDocument):
    """Work that a region threw away as unfit, again and again, since work of it was merged."""

    times: int
    """In a row."""
    tokens: float
    step: int
    """Its step when that began."""
    seconds: float
    """Since then."""
    published: bool
    """Not one step was sound from the published weights on."""
    why: str


class RegionStatus(StatusDocument):
    """One region; alive, training and contributing are three different things."""

    name: str
    alive: bool
    training: bool
    contributing: bool
    left: bool
    """It said goodbye before the run was finished."""
    done: bool
    step: int | None
    tokens_per_second: float | None
    loss: float | None
    staleness: int | None
    share: float | None
    """Of the merged weight, mean over rounds."""
    last_merged_seconds: float | None
    restarts: int | None
    blocked: float | None
    lost: Amount
    """Tokens trained and lost with a trainer that died."""
    refused: int
    mended: int
    quarantined: bool
    pace: float | None
    """Inner steps per second on record; None before they are learnt."""
    overclaim: str
    """What of its latest claims did not count; empty if all did."""
    unbalanced: bool
    """Its reports contradict what is merged, and are not added to anything."""
    until: float | None
    """Tokens that it may have trained in all before it waits; None before it was told."""
    why: str
    """What it waits for."""
    member: bool = True
    """It has joined and is not retired; only members count."""
    listed: bool = True
    """The spec lists it; others came with a credential of the run."""
    retired: str = ""
    """Why it is no member any more."""
    terms: int | None = None
    """Number of the terms that its trainer works under."""
    lanes: int | None = None
    """Lanes of its text that it reads; None while the text is not known."""
    devices: int | None = None
    """Devices that it trains on."""
    tflops: float | None = None
    """Tera-operations per second of one of them."""
    mfu: float | None = None
    """Share of what such a device can do at best; None of a kind that is not known."""
    device_memory: int | None = None
    """Bytes in use on the fullest of them."""
    hosts: tuple[HostStatus, ...] = ()
    """How fast each of its hosts is by itself; empty where there is one."""

    link_up: float | None = None
    """Bytes per second at which its uploads were measured."""
    link_down: float | None = None

    silent_seconds: float | None = None
    """Since its last heartbeat."""
    divergence: DivergenceStatus | None = None
    """What it throws away, if it does so again and again."""
    exploded: bool = False
    """Its training loss is many times that of the first weights."""

    failed: str = ""
    """Why its worker is not started again; only `diloco run` knows."""
    starting: bool = False
    """Its worker was started and has not joined yet; only `diloco run` knows."""

    @property
    def state(self) -> str:
        """Names in one word what the region does."""
        for word in ("failed", "retired", "done", "left", "starting"):
            if getattr(self, word):
                return word
        if not self.member:
            return "expected"
        if not self.alive:
            return "away"
        if not self.training:
            return "idle" if self.step else "starting"
        if self.divergence or self.exploded:
            return "diverging"
        return "contributing" if self.contributing else "training"


class TextStatus(StatusDocument):
    """A text that regions read, and divide if there are several."""

    order: str
    tokens: int
    """Of the training part."""
    lanes: int
    regions: tuple[str, ...]
    settings: str
    """Equal for texts that differ in their files only."""


class Status(StatusDocument):
    """A run that is being served."""

    run: str
    name: str
    url: str
    state: str
    why: str
    trouble: str
    """What keeps the rounds from going on, such as a full disk."""
    regions_go_on: bool
    """The server is stopping alone, and its regions wait for the next one."""
    clock: tuple[int, ...]
    """The newest version of every fragment."""
    outer_steps: int
    tokens: RunTokens
    loss: LossStatus
    wire: WireUse
    goodput: float | None
    """Tokens applied over tokens trained; people read it as `kept`."""
    goodputs: Goodputs
    seconds: float
    fragments: tuple[FragmentStatus, ...]
    regions: tuple[RegionStatus, ...]
    terms: int = 0
    """How often the run was amended."""
    amendments: tuple[Amendment, ...] = ()
    """The newest ones, with who made them and when."""

    parameters: int | None = None
    """Of the whole model."""
    quorum: int | None = None
    """Regions that a round needs."""
    texts: tuple[TextStatus, ...] = ()
    """What members read, each text once."""
    start: StartStatus | None = None
    rebuilt: RebuiltStatus | None = None
    hopeless: str = ""
    """Why it stopped by itself: every region threw its work away."""
    reachable: bool = True
    """False in a copy that is shown while the server does not answer."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def over(self) -> bool:
        """Says whether nothing more will come; a server that stopped alone is started again."""
        return self.ended and not self.regions_go_on


class FragmentSummary(StatusDocument):
    fragment: int
    version: int
    tokens: FragmentTokens


class RegionSummary(StatusDocument):
    share: float | None = None
    applied: float | None = None
    refused: int | None = None
    lost: Amount | None = None
    failed: str = ""
    """Why its worker was given up; added by `diloco run`."""


class Summary(StatusDocument):
    """What a run came to; little but its state if no server could write one."""

    run: str = ""
    name: str = ""
    state: str
    why: str = ""
    regions_go_on: bool = False
    tokens: RunTokens | None = None
    balanced: bool | None = None
    """Whether every token trained has exactly one fate."""
    overshoot: str = ""
    """By how much more than the budget was applied, and why; empty where it was kept."""
    fragments: tuple[FragmentSummary, ...] = ()
    loss: LossStatus = LossStatus()
    outer_steps: int | None = None
    wire: WireUse | None = None
    goodput: float | None = None
    goodputs: Goodputs = Goodputs()
    wall_seconds: float | None = None
    regions: dict[str, RegionSummary] = Field(default_factory=dict)
    spec_digest: str = ""
    layout_digest: str = ""
    start: StartStatus | None = None
    rebuilt: RebuiltStatus | None = None
    hopeless: str = ""
    """Why it stopped by itself: every region threw its work away."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def over(self) -> bool:
        return self.ended and not self.regions_go_on


class LastKnown(StatusDocument):
    """What the run log alone tells of a run whose server is gone."""

    state: str
    outer_steps: int
    tokens: dict[str, Amount]
    """`applied` and `budget`, where they are known."""
    loss: LossStatus
    wire: dict[str, int]
    regions: dict[str, str]
    """joined, lapsed, left or retired."""
    away: dict[str, float]
    """Since when regions on this host do not reach the server, which may be elsewhere."""
    time: float | None = None
    url: str | None = None
    wall_seconds: float | None = None
    why: str = ""
