"""What does a region need of each device, does it fit, and what is the least that makes it?

Reckoned from shapes, nothing allocated or compiled:

    state        weights and the optimiser's averages, dealt out over fsdp × tensor
    gradients    likewise
    working      activations of one micro-batch, its logits, and the weights of a block while
                 they are put together; about what XLA says, see docs/results/regions.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_cli.errors import SpecError
from diloco_cli.models import Described, LossForm, Model, Partitioned, models, parameters
from diloco_cli.spec.quantities import MEMORY, NoQuantity
from diloco_cli.spec.schema import InnerSpec, MeshSpec, RunSpec
from diloco_cli.worker.engines.accelerators import ACCELERATORS

USABLE = 0.9
"""Of a device's memory; the rest goes to the framework, to fragmentation and to our error."""
LIKELY_MFU = 0.4
"""What large models reach on accelerators, roughly; assumed where no speed is given."""
MOST_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device that a plan is made for."""

    name: str
    memory: float
    """Bytes."""
    peak: float | None = None
    """Operations a second in bfloat16."""

    def flash(self, inner: InnerSpec) -> bool:
        """Whether attention there remembers no pairs of tokens."""
        if self.name.startswith("v"):  # TPUs.
            return inner.sequence % 128 == 0
        return inner.compute == "bfloat16"


def named_device(word: str) -> NamedDevice:
    """Reads h100, v5p and so on, or a size such as 80GB."""
    for one in ACCELERATORS:
        if one.name == word.lower():
            return NamedDevice(one.name, one.memory, one.peak)
    try:
        return NamedDevice(word, MEMORY.read(word))
    except NoQuantity as error:
        if error.why:
            raise
    raise SpecError(
        f"--device {word}: there is no such device.",
        hint=f"Known are {', '.join(one.name for one in ACCELERATORS)}; or say how much memory "
        "it has, as in 80GB.",
    )


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Bytes, of each device of a region."""

    region: str
    devices: int
    state: float
    gradients: float
    working: float

    @property
    def total(self) -> float:
        return self.state + self.gradients + self.working


def device_needs(spec: RunSpec, device: NamedDevice | None = None) -> list[DeviceNeeds]:
    """What every region needs; without a named device attention is taken to be a plain one."""
    model = models.build(spec.model)
    return [
        needs_of(
            model,
            spec.inner_of(region.name),
            region.devices_by_axis,
            region=region.name,
            device=device,
        )
        for region in spec.regions
    ]


def needs_of(
    model: Model,
    inner: InnerSpec,
    mesh: MeshSpec,
    *,
    region: str = "",
    device: NamedDevice | None = None,
) -> DeviceNeeds:
    size = 4 * parameters(model) / (mesh.fsdp * mesh.tensor)
    # Where they are not dealt out again they are there twice while groups add them up.
    copies = 2 if mesh.data > 1 and mesh.fsdp == 1 else 1
    return DeviceNeeds(
        region=region,
        devices=mesh.size,
        state=size * (1 + averages(inner)),
        gradients=copies * size,
        working=_working(model, inner, mesh, flash=device is not None and device.flash(inner)),
    )


def averages(inner: InnerSpec) -> int:
    """How many numbers the optimiser remembers for each weight."""
    kinds = {"adamw": 2, "sgd": 1 if inner.optimizer.get("momentum", 0.9) else 0}
    return kinds.get(str(inner.optimizer.get("kind")), 2)


def _working(model: Model, inner: InnerSpec, mesh: MeshSpec, *, flash: bool) -> float:
    if not isinstance(model, Described):
        return 0.0
    batch = inner.batch / inner.accumulate / (mesh.data * mesh.fsdp)
    form = LossForm(inner.compute, inner.remat, inner.loss_chunks)
    kept = model.activation_bytes(batch, inner.sequence, form, tensor=mesh.tensor, flash=flash)
    return kept + _put_together(model, inner, mesh)


def _put_together(model: Model, inner: InnerSpec, mesh: MeshSpec) -> float:
    """Weights of a block, or of the embedding, in one piece, and their gradient before it is
    dealt out again."""
    if mesh.fsdp == 1 or not isinstance(model, Partitioned):
        return 0.0
    sizes = {tensor.name: tensor.size for tensor in model.tensors()}
    block = sum(sizes[stack[0]] for stack in model.stacks().values())
    embedding = max(tensor.size for tensor in model.tensors() if tensor.embedding)
    rounded = 2 if inner.compute == "bfloat16" else 4
    return max(block, embedding) / mesh.tensor * (2 * rounded + 4)


# What makes it fit


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """Whether a region fits into its devices."""

    needs: DeviceNeeds
    device: NamedDevice
    remedy: dict[str, Any] | None = None
    """What to change so that it does: keys of `inner`, and `mesh`; None if it does, or nothing
    would do."""

    @property
    def fits(self) -> bool:
        return self.needs.total <= USABLE * self.device.memory


def alike(needs: Iterable[DeviceNeeds]) -> list[tuple[str, DeviceNeeds]]:
    """The needs that differ, each with the names of all regions that have them."""
    found: dict[DeviceNeeds, list[str]] = {}
    for one in needs:
        found.setdefault(replace(one, region=""), []).append(one.region)
    return [(", ".join(names), one) for one, names in found.items()]


def verdicts(spec: RunSpec, device: NamedDevice) -> list[DeviceVerdict]:
    model, found = models.build(spec.model), []
    for region, needs in zip(spec.regions, device_needs(spec, device), strict=True):
        verdict = DeviceVerdict(needs, device)
        if not verdict.fits:
            inner, mesh = spec.inner_of(region.name), region.devices_by_axis
            verdict = DeviceVerdict(needs, device, _remedy(model, inner, mesh, device))
        found.append(verdict)
    return found


def _remedy(
    model: Model, inner: InnerSpec, mesh: MeshSpec, device: NamedDevice
) -> dict[str, Any] | None:
    for changed, wider in _milder_first(model, inner, mesh):
        needs = needs_of(model, changed, wider, device=device)
        if needs.total <= USABLE * device.memory:
            before, after = inner.model_dump(), changed.model_dump()
            remedy = {key: value for key, value in after.items() if value != before[key]}
            if wider != mesh:
                remedy["mesh"] = {axis: count for axis, count in wider if count > 1}
            return remedy
    return None


def _milder_first(
    model: Model, inner: InnerSpec, mesh: MeshSpec
) -> Iterator[tuple[InnerSpec, MeshSpec]]:
    """One key after another, the cheapest first; then all of them on more and more devices."""
    changed = inner
    if isinstance(model, Partitioned):
        for key, value in (("remat", "block"), ("compute", "bfloat16"), ("loss_chunks", 8)):
            fitting = key != "loss_chunks" or (inner.sequence % 8 == 0 and inner.loss_chunks == 1)
            if getattr(changed, key) != value and fitting:
                yield inner.changed({key: value}), mesh  # Perhaps it is enough by itself.
                changed = changed.changed({key: value})
                yield changed, mesh
    for wider in _more_devices(mesh):
        shares = wider.data * wider.fsdp
        for parts in _divisors(inner.batch // shares if inner.batch % shares == 0 else 0):
            if parts >= inner.accumulate or wider != mesh:
                yield changed.changed({"accumulate": parts}), wider


def _more_devices(mesh: MeshSpec) -> Iterator[MeshSpec]:
    while mesh.size <= MOST_DEVICES:
        yield mesh
        mesh = mesh.model_copy(update={"fsdp": 2 * mesh.fsdp})


def _divisors(number: int) -> Sequence[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def likely_steps(spec: RunSpec, device: NamedDevice) -> dict[str, float]:
    """Seconds of a step in every region, if large models run there as they usually do."""
    model = models.build(spec.model)
    if device.peak is None or not isinstance(model, Described):
        return {}
    return {
        region.name: model.step_flops(inner.batch, inner.sequence)
        / (region.devices_by_axis.size * device.peak * LIKELY_MFU * region.speed)
        for region in spec.regions
        for inner in (spec.inner_of(region.name),)
    }
