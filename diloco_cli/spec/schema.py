"""The run spec: one file that describes a whole run.

Sections are frozen and refuse unknown keys. A spec that loads is a spec that can
run: whatever can be checked without a network or an accelerator is checked here
or, for things named by `kind`, in `assemble`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from diloco_cli.spec.chaos_rules import disturbances
from diloco_cli.spec.fault_kinds import Kind
from diloco_cli.spec.quantities import rate_of, seconds_of
from diloco_cli.spec.rules import Conflicts, Path, conflicts


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
_NAME = r"^[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=_NAME)]


def is_a_name(text: str) -> bool:
    """Says whether a run or a region can be called so."""
    return re.fullmatch(_NAME, text) is not None


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class BudgetSpec(Section):
    """How much to train."""

    tokens: PositiveInt
    """Merged tokens of all regions together."""


class StartSpec(Section):
    """Weights to begin with, instead of those that the seed makes."""

    weights: Annotated[str, Field(min_length=1)]
    """A safetensors file as `diloco pull` writes it, the folder of another run, or the URL of a
    running server. Read once, at the first start, on the server's host."""

    momentum: Literal["fresh", "keep"] = "fresh"
    """Begin the outer optimiser anew, or `keep` its momentum, which only a run folder has."""

    @property
    def is_url(self) -> bool:
        return self.weights.startswith(("http://", "https://"))


class InnerSpec(Section):
    """What one region does between two exchanges."""

    batch: PositiveInt = 16
    """Sequences in one inner step."""

    sequence: Annotated[Int, Field(ge=8)] = 128
    """Tokens in one sequence."""

    accumulate: PositiveInt = 1
    """Micro-batches a step is cut into, to save memory."""

    compute: Literal["float32", "bfloat16"] = "float32"
    """What products are computed in. Weights, gradients, norms, softmax and all sums stay float32;
    `bfloat16` is for accelerators, on a CPU it is no faster."""

    remat: Literal["none", "block"] = "none"
    """What is computed twice to save memory: nothing, which is fastest for small models, or every
    block, which then needs the memory of one and compiles in the same time at any depth."""

    loss_chunks: PositiveInt = 1
    """Parts of every sequence whose logits exist at a time; more than 1 for large vocabularies."""

    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """Which program computes attention; `auto` takes what suits device, type and shape."""

    clip: Annotated[Float, Field(gt=0)] = 1.0
    """Largest norm of the gradient of one inner step."""

    optimizer: Choice = {"kind": "adamw", "lr": 3.0e-3}
    """What turns gradients into steps; `diloco explain optimizer` lists the kinds."""

    schedule: Choice = {"kind": "cosine", "warmup": 50}
    """How the learning rate moves over the run; `diloco explain schedule` lists the kinds."""

    def changed(self, own: dict[str, Any] | None) -> InnerSpec:
        """Says how a region trains that changes these keys."""
        return InnerSpec.model_validate({**self.model_dump(), **(own or {})})


class MeshSpec(Section):
    """The devices of a region, by what is dealt out over them."""

    data: PositiveInt = 1
    """Groups of devices that hold the same weights and train on different sequences."""

    fsdp: PositiveInt = 1
    """Devices over which weights, optimiser and sequences are dealt out; the usual choice."""

    tensor: PositiveInt = 1
    """Devices that share heads, hidden numbers and vocabulary of the same sequences; for models
    too wide for fsdp alone, over fast links."""

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return " × ".join(f"{axis} {count}" for axis, count in self if count > 1) or "one"


class TrainerSpec(Section):
    """A training program of your own, instead of the built-in one."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """What the worker starts, and starts again when it dies, as in `[python, train.py]`; it joins
    with `Region.here()`. `inner.batch` × `inner.sequence` is the most that a step of it counts.
    {python}, {region} and {folder} stand for the worker's interpreter, its region and folder."""

    attach: bool = False
    """Start nothing: a program that is started elsewhere on this host joins by itself."""

    patience: Annotated[str, BeforeValidator(_as_written)] = "30m"
    """How long a program that was started may make no step, though it could, before it is killed
    and started again, as in `10m` or `2h`."""

    @property
    def patience_seconds(self) -> float:
        return seconds_of(self.patience) or float("inf")


class CheckpointSpec(Section):
    """Sharded checkpoints of a region with many devices."""

    kind: Literal["orbax"]
    """`orbax`: every device's part is written apart, beside the training."""

    to: Annotated[str, Field(min_length=1)] | None = None
    """A folder that every host of the region reaches; in the region's own folder when left out."""

    every: Annotated[str, BeforeValidator(_as_written)] = "10m"
    """Time from one to the next, as in `90s` or `10m`."""

    keep: PositiveInt = 2
    """How many are kept; the older ones go once a newer one is whole."""

    @property
    def every_seconds(self) -> float:
        return seconds_of(self.every) or float("inf")


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
    """Devices of the region's host to train on; short for `mesh: {fsdp: N}`."""

    mesh: MeshSpec | None = None
    """The devices of the region, by what is dealt out over them; one when left out."""

    trainer: TrainerSpec | None = None
    """A training program of your own, in any framework, instead of the built-in one."""

    checkpoint: CheckpointSpec | None = None
    """How the region keeps what it has not sent, and its optimiser; one file when left out, which
    is right for models that one host holds several times."""

    hosts: PositiveInt | None = None
    """Hosts that the devices of the mesh belong to, each with an equal part; one when left out."""

    speed: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """For trials: train at this share of the possible speed."""

    pace: Positive | None = None
    """Inner steps per second that the region can make; 1.25 times that is the most that counts of
    what it claims. Without it the server learns it from the first ten minutes, and believes
    no region more than 8 times the pace of the others."""

    @property
    def host_count(self) -> int:
        return self.hosts or 1

    @property
    def devices_by_axis(self) -> MeshSpec:
        """The mesh that is asked for, in either way."""
        return self.mesh or MeshSpec(fsdp=self.devices or 1)


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
    """0: a region waits for the answer to what it posted. Above 0 nobody waits; with `adopt:
    replace` or `blend` it is the steps whose loss the grace window takes into account, with
    `rebase`, which loses none, all values above 0 are the same."""

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

    down: Choice = {"kind": "int4", "block": 512}
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

    health: str | None = None
    """HOST:PORT for `/healthz` alone, in plain HTTP and without credentials, for probes that can
    show none; whoever can connect learns whether the server is well and what its trouble is."""

    store: Choice = {"kind": "folder"}
    """Where the server keeps what must survive a crash."""

    lease: Annotated[Float, Field(gt=0)] = 10.0
    """Seconds without a heartbeat after which a region counts as gone."""

    grant: Annotated[Float, Field(ge=0)] = 600.0
    """Seconds, beyond three leases, after which other regions read the lanes of a silent one; and
    how long a listed region that has not joined yet has its share of them kept."""

    admit: Literal["listed", "credentialed", "open"] = "listed"
    """Who may join: regions that the spec lists, whoever has a credential of the run
    (`diloco certs issue --region NAME` is all it takes), or anybody, on loopback only."""

    members: PositiveInt = 256
    """Regions that may be members at once without being listed."""

    forget: Annotated[str, BeforeValidator(_as_written)] = "7d"
    """Silence after which a region is retired, as in `12h` or `7d`: it counts no more and may
    join again."""

    guard: GuardSpec = GuardSpec()
    """What a contribution must be like to be merged."""

    @property
    def forget_seconds(self) -> float:
        return seconds_of(self.forget) or float("inf")


class EvaluateSpec(Section):
    """The held-out loss of the global weights."""

    every: PositiveInt = 4
    """Outer steps of the whole model between two evaluations."""

    batches: PositiveInt = 8
    """Batches of held-out text in one evaluation."""

    region: Name | None = None
    """Who evaluates; a live region whose copies are fresh when left out."""

    sample: Annotated[int, Field(ge=0, le=400)] = 0
    """Tokens that it continues the beginning of a held-out text by, for the page and the report; 0:
    none. Costs at most a hundredth of its time; regions of several devices write none."""


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

    start: StartSpec | None = None
    """Weights to begin with, instead of those that the seed makes."""

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
        """How a region is listed; one that is not trains as the run says."""
        listed = (region for region in self.regions if region.name == name)
        return next(listed, None) or RegionSpec(name=name)

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
            model = section_of(field.annotation) if field else None
    return list(model.model_fields) if model else []


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, or a list of them; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (section_of(inner) for inner in get_args(annotation))
    return next((section for section in found if section), None)
