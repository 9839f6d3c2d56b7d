"""The devices of a region: its mesh, what they are capable of, and when they are full."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from diloco_cli.errors import DilocoError, RunFailed, SpecError
from diloco_cli.spec.schema import RegionSpec
from diloco_cli.worker.engines.accelerators import known

AXES = ("data", "fsdp", "tensor")


def open_mesh(region: RegionSpec) -> Mesh | None:
    """Arranges the devices that a region asks for; None if that is one."""
    asked, hosts = region.devices_by_axis, region.host_count
    each, found = asked.size // hosts, jax.local_devices()
    if each > len(found):
        of = f", {each} on each of its {hosts} hosts" if hosts > 1 else ""
        raise SpecError(
            f"Region {region.name} asks for {asked.size} devices ({asked}){of}, but JAX finds "
            f"{len(found)} of kind {found[0].device_kind} on this host.",
            hint=f"Lower `mesh` (or `devices`) of {region.name}, or start it on a host with "
            f"{each}. For a trial on processors: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={each}.",
        )
    if asked.size == 1:
        return None
    # The first ones of every process; of a single one, its first.
    taken = [
        device
        for process in range(jax.process_count())
        for device in [one for one in jax.devices() if one.process_index == process][:each]
    ]
    shape = (asked.data, asked.fsdp, asked.tensor)
    # Automatic: XLA follows the shardings of arguments and results through the program.
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=taken)


def devices_of(mesh: Mesh | None) -> list[Any]:
    """The devices of a mesh; without one, the device that JAX uses by itself."""
    return jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)


def peak_of(devices: Sequence[Any]) -> float | None:
    """Operations a second of one device, if we know its kind."""
    accelerator = known(devices[0].device_kind)
    return accelerator.peak if accelerator else None


def memory_in_use(devices: Sequence[Any]) -> int | None:
    """Bytes in use on the fullest device; processors do not say."""
    used = [(device.memory_stats() or {}).get("bytes_in_use") for device in devices]
    return max((int(each) for each in used if each is not None), default=None)


OUT_OF_MEMORY = re.compile(r"resource_exhausted|(?:ran )?out of memory", re.IGNORECASE)
SMALLER = (
    "Lower `inner.batch`, or raise `inner.accumulate` and leave it as it is; set `inner.remat: "
    "block` and more `inner.loss_chunks`; or give the region more devices with `mesh`. `diloco "
    "plan` says what fits. What was merged, sent or saved is not lost."
)


def out_of_memory(error: RuntimeError, region: str, *, stepped: bool) -> DilocoError | None:
    """What to say of devices that are full; None if that is not what the error is about.

    A region that has made steps may do so again: others may have taken the memory. One that has
    not would fail in the same way forever.
    """
    if not OUT_OF_MEMORY.search(str(error)):
        return None
    asked = re.search(r"(\d+) bytes", str(error))
    size = f", which asked for {int(asked[1]) / 1e9:.2f} GB more" if asked else ""
    devices = jax.devices()
    where = f"its devices ({len(devices)} of kind {devices[0].device_kind})"
    if stepped:
        message = f"Region {region} ran out of memory on {where} between two steps{size}."
        return RunFailed(message, hint=SMALLER)
    return SpecError(f"The first step of region {region} does not fit {where}{size}.", hint=SMALLER)
