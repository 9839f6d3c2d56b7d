"""The run spec: one file that describes a whole run.

Sections are frozen and refuse unknown keys. A spec that loads is a spec that can
run: whatever can be checked without a network or an accelerator is checked here
or, for things named by `kind`, in `assemble`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from diloco_cli.spec.chaos_rules import disturbances
from diloco_cli.spec.fault_kinds import Kind
from diloco_cli.spec.rules import Conflicts, Path, conflicts, rate_of


def _not_a_switch(value: Any) -> Any:
    # Python counts True as 1, so `batch: true` would otherwise train with a batch of one.
    if isinstance(value, bool):
        raise ValueError("needs a number")
    return value


def _as_written(value: Any) -> Any:
    # A number without a unit is for the rules to refuse, which say what is missing.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Choice = dict[str, Any]
"""A mapping with a `kind` and that kind's options; resolved by the registry that owns the kind."""

Int = Annotated[int, BeforeValidator(_not_a_switch)]
Float = Annotated[float, BeforeValidator(_not_a_switch)]
PositiveInt = Annotated[Int, Field(ge=1)]
Positive = Annotated[Float, Field(gt=0)]
Written = Annotated[str | None, BeforeValidator(_as_written)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class BudgetSpec(Section):
    """How much to train."""

    tokens: PositiveInt
    """Merged tokens of all regions together."""


class InnerSpec(Section):
    """What one region does between two exchanges."""

    batch: PositiveInt = 16
    """Sequences in one inner step."""

    sequence: Annotated[Int, Field(ge=8)] = 128
    """Tokens in one sequence."""

    accumulate: PositiveInt = 1
    """Micro-batches a step is cut into, to save memory."""

    clip: Annotated[Float, Field(gt=0)] = 1.0
    """Largest norm of the gradient of one inner step."""

    optimizer: Choice = {"kind": "adamw", "lr": 3.0e-3}
    """What turns gradients into steps; `diloco explain optimizer` lists the kinds."""

    schedule: Choice = {"kind": "cosine", "warmup": 50}
    """How the learning rate moves over the run; `diloco explain schedule` lists the kinds."""

    def changed(self, own: dict[str, Any] | None) -> InnerSpec:
        """Says how a region trains that changes these keys."""
        return InnerSpec.model_validate({**self.model_dump(), **(own or {})})


class RegionSpec(Section):
    """One site that trains."""

    name: Name
    """What the region is called in commands, folders and reports."""

    data: dict[str, Any] | None = None
    """Replaces the run's `data` here; data never leaves its region."""

    inner: dict[str, Any] | None = None
    """Changes single keys of the run's `inner` here, for example `{batch: 8}`."""

    token_file: Annotated[str, Field(min_length=1)] | None = None
    """File with this region's token, instead of the one in its folder of `server.certs`."""

    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable with this region's token, instead of a file."""

    devices: PositiveInt | None = None
    """Accelerators to use; this version trains on one a region and refuses more."""

    speed: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """For trials: train at this share of the possible speed."""


class GraceSpec(Section):
    """How long a round that has its quorum still waits for the other live regions."""

    kind: Literal["adaptive", "fixed", "none"] = "adaptive"
    """Follow the regions' usual pace, wait a fixed time, or close at once."""

    margin: Annotated[Float, Field(gt=0, le=1)] = 0.5
    """adaptive: share of the time at hand that may be spent waiting."""

    seconds: Annotated[Float, Field(ge=0)] = 30.0
    """fixed: the window itself."""


class SyncSpec(Section):
    """When fragments travel and when a round may close."""

    fragments: PositiveInt = 4
    """Slices of the model that travel one after the other, so the link is never idle for long."""

    every: PositiveInt = 24
    """Inner steps between two exchanges of one fragment; answers come a step or two later."""

    overlap: Annotated[Int, Field(ge=0)] = 2
    """Inner steps a region may make while a fragment travels; 0 waits for the answer."""

    quorum: PositiveInt = 1
    """Contributions a round needs before it may close at all."""

    grace: GraceSpec = GraceSpec()
    """How long a round that has its quorum still waits for the other live regions."""

    staleness: Annotated[Int, Field(ge=0)] = 2
    """Versions a contribution may lag behind before it is returned; under `adopt: rebase` old
    work is always welcome."""

    adopt: Literal["rebase", "replace", "blend"] = "rebase"
    """What happens to unmerged work when a new version arrives: kept, dropped, or scaled by
    `blend`."""

    blend: Annotated[Float, Field(gt=0, lt=1)] = 0.5
    """adopt: blend keeps this share of the unmerged work."""

    @property
    def alpha(self) -> float:
        return {"rebase": 1.0, "replace": 0.0, "blend": self.blend}[self.adopt]


class WireSpec(Section):
    """What travels."""

    up: Choice = {"kind": "int4", "block": 512}
    """Codec of contributions, region to server; `diloco explain codec` lists the kinds."""

    down: Choice = {"kind": "int8", "block": 512}
    """Codec of new versions, server to regions."""

    zstd: Annotated[Int, Field(ge=1, le=19)] = 1
    """Compression level; 1 was measured to be as small as any."""

    rate_limit: Written = None
    """The most that a region's uploads may take of its line, as in `50Mbit`; each region may
    have its own (`--set wire.rate_limit=…`). Without it they take what they get."""

    @property
    def bits_per_second(self) -> float | None:
        return rate_of(self.rate_limit) if self.rate_limit else None


class GuardSpec(Section):
    """What a contribution must be like to be merged."""

    norm: Annotated[Float, Field(ge=2, allow_inf_nan=False)] = 20.0
    """Times the usual norm above which a contribution is refused; more if it holds more steps."""

    agreement: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Least agreement with a round's other members, as a share of theirs with each other;
    0 asks for none. Against regions that may lie, not for regions with very different data."""


class ServerSpec(Section):
    """The aggregation server."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one. Beyond this machine only with `certs`."""

    certs: Annotated[str, Field(min_length=1)] | None = None
    """Folder that `diloco certs` made: TLS 1.3, client certificates and tokens for everybody."""

    store: Choice = {"kind": "folder"}
    """Where the server keeps what must survive a crash."""

    lease: Annotated[Float, Field(gt=0)] = 10.0
    """Seconds without a heartbeat after which a region counts as gone."""

    guard: GuardSpec = GuardSpec()
    """What a contribution must be like to be merged."""


class EvaluateSpec(Section):
    """The held-out loss of the global weights."""

    every: PositiveInt = 4
    """Outer steps of the whole model between two evaluations."""

    batches: PositiveInt = 8
    """Batches of held-out text in one evaluation."""

    region: Name | None = None
    """Who evaluates; the first live region when left out."""


class FaultSpec(Section):
    """One thing that goes wrong, once, again and again, or at random."""

    kind: Kind
    """`kill-trainer`, `kill-agent`: that process dies; `kill-region`: both, as if the host had
    died; `kill-server`; `pause`: the region stands still; `slow`: its steps take longer; `leave`:
    it says goodbye and joins again; `cut`: nothing passes between it and the server; `narrow`: its
    link becomes another; `reset`: its connections break."""

    region: Name | None = None
    """Whom it strikes; left out: any of them, drawn by the seed. The server needs none."""

    per_hour: Positive | None = None
    """At random, so often in an hour, of all regions it may strike together."""

    shape: Positive | None = None
    """per_hour: shape of the Weibull law; 1 (exponential) when left out, below it in clusters."""

    at: Annotated[Float, Field(ge=0)] | None = None
    """Once, after so many seconds; with `every` the first time."""

    every: Positive | None = None
    """Again and again, with so many seconds between two beginnings."""

    duration: Positive | None = None
    """Seconds it lasts. What was killed is otherwise back as soon as its supervisor can."""

    factor: Annotated[Float, Field(gt=1)] | None = None
    """slow: how many times as long a step takes."""

    link: Written = None
    """narrow: what the link becomes, as in `1Mbit/200ms`."""


class ChaosSpec(Section):
    """What goes wrong on purpose, under `diloco chaos`."""

    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Everything drawn follows from it."""

    seconds: Positive = 600.0
    """How long it goes on, from the moment every region has made its first step."""

    step_seconds: Positive | None = None
    """The least a region's inner step takes, divided by its `speed`. Regions then have a pace of
    their own, whatever the machine could spare, and the death of one speeds up no other."""

    link: Written = None
    """The link of every region to the server, emulated: rate and round trip, as in
    `10Mbit/50ms`."""

    links: dict[str, Annotated[str, BeforeValidator(_as_written)]] = {}
    """Links of single regions, as in `{paris: 1Mbit/200ms}`."""

    faults: tuple[FaultSpec, ...] = ()
    """What goes wrong; nothing when left out, which is the run to compare with."""


class RunSpec(Section):
    """One file that describes a whole run."""

    spec: Literal[1]
    """Version of this format."""

    name: Name
    """What the run is called; its folder is `runs/NAME`."""

    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Initial weights and the order of the data follow from it."""

    budget: BudgetSpec
    """How much to train."""

    model: Choice = {"kind": "decoder", "size": "tiny"}
    """What is trained; `diloco explain model` lists the kinds."""

    data: Choice = {"kind": "python-source"}
    """What it is trained on; `diloco explain data` lists the kinds."""

    inner: InnerSpec = InnerSpec()
    """What one region does between two exchanges."""

    regions: Annotated[tuple[RegionSpec, ...], Field(min_length=1)]
    """The sites that train."""

    sync: SyncSpec = SyncSpec()
    """When fragments travel and when a round may close."""

    merge: Choice = {"kind": "radial"}
    """How contributions become one; `diloco explain merge` lists the kinds."""

    outer: Choice = {"kind": "nesterov", "lr": 0.4, "momentum": 0.9}
    """How what was merged moves the global weights; `diloco explain outer` lists the kinds."""

    wire: WireSpec = WireSpec()
    """What travels."""

    server: ServerSpec = ServerSpec()
    """The aggregation server."""

    evaluate: EvaluateSpec = EvaluateSpec()
    """The held-out loss of the global weights."""

    export: dict[str, Any] | None = None
    """Reserved; must be empty in this version."""

    chaos: ChaosSpec | None = None
    """What `diloco chaos` does to the run, and how fast its regions step; `run` has no use for
    the faults."""

    plugins: tuple[str, ...] = ()
    """Python modules imported before kinds are resolved, so that they can register their own."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if faults := [*conflicts(self), *disturbances(self)]:
            raise Conflicts(self, faults)
        return self

    def region(self, name: str) -> RegionSpec:
        return next(region for region in self.regions if region.name == name)

    def inner_of(self, name: str) -> InnerSpec:
        """Says how this region trains: the run's `inner` with the region's own keys on top."""
        return self.inner.changed(self.region(name).inner)

    def data_of(self, name: str) -> Choice:
        return self.region(name).data or self.data


def keys_at(path: Path) -> list[str]:
    """Lists the keys the section at this path has; none where a kind decides."""
    model: type[BaseModel] | None = RunSpec
    for step in path:
        if model is not None and isinstance(step, str):
            field = model.model_fields.get(step)
            model = _section(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (_section(inner) for inner in get_args(annotation))
    return next((section for section in found if section), None)
