"""What `run`, `serve` and `work` look at before they start anything: the quick part of `doctor`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path

from diloco_cli.assemble import fragment_sizes
from diloco_cli.errors import SpecError
from diloco_cli.observe.units import bytes_
from diloco_cli.plan.devices import device_needs
from diloco_cli.plan.needs import host_memory, server_memory
from diloco_cli.run.doctor.host import Check, existing
from diloco_cli.run.doctor.text import text
from diloco_cli.server.store import stores
from diloco_cli.server.store.on_disk import Folder
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import most_bytes


def refuse_unready(checks: Iterator[Check]) -> list[str]:
    """Raises the first check that failed; gives the warnings."""
    warned = []
    for check in checks:
        if check.state == "fail":
            raise SpecError(check.said, hint=check.fix)
        if check.state == "warn":
            warned.append(f"{check.said}. {check.fix}".rstrip())
    return warned


def before_start(
    spec: RunSpec,
    folder: Path,
    regions: Sequence[str],
    environment: Mapping[str, str],
    *,
    serves: bool,
) -> Iterator[Check]:
    """Looks at text, disk, memory and devices for these regions, and the server if it `serves`."""
    yield from text(spec, regions)
    if serves:
        yield from disk_reserve(spec, folder)
    yield from _memory(spec, regions, serves=serves)
    if (found := accelerators(environment)) is not None:
        asked = sum(spec.region(name).devices_by_axis.size for name in regions)
        if found > asked > 0:
            yield idle_devices(found, asked)


def disk_reserve(spec: RunSpec, folder: Path) -> Iterator[Check]:
    """Whether a first contribution could be taken at all."""
    store = stores.build(spec.server.store)
    if not isinstance(store, Folder):
        return
    codec = codecs.build(spec.wire.up)
    largest = max(most_bytes(size, codec) for size in fragment_sizes(spec))
    need, free = store.reserve + largest, shutil.disk_usage(existing(folder)).free
    if free < need:
        yield Check(
            "reserve",
            # One that has begun still serves its weights, and goes on by itself later.
            "warn" if (folder / "server" / "journal").exists() else "fail",
            f"{folder} has {bytes_(free)} free, and no contribution is taken with less than "
            f"{bytes_(need)}",
            "Make room, use another disk with --dir, or lower server.store.reserve.",
        )


def _memory(spec: RunSpec, regions: Sequence[str], *, serves: bool) -> Iterator[Check]:
    import psutil

    sizes, free = fragment_sizes(spec), psutil.virtual_memory().available
    names = set(regions)
    need = server_memory(sizes) if serves else 0.0
    need += len(names) * host_memory(spec, sizes)
    if accelerators({}) is None:  # Then what is for devices lies in the host's memory.
        needs = device_needs(spec)
        need += sum(one.devices * one.total for one in needs if one.region in names)
    if free < need:
        who = f"{len(names)} region{'s' * (len(names) != 1)}" if names else ""
        who = " and ".join(filter(None, (who, "the server" if serves else "")))
        fix = "`diloco plan` says what to make smaller."
        yield Check(
            "memory", "warn", f"{bytes_(free)} are free, {who} need about {bytes_(need)}", fix
        )


def idle_devices(found: int, asked: int) -> Check:
    text = f"{found} devices are here, {asked} asked for: {found - asked} will stand idle"
    return Check("devices", "warn", text, "Raise regions[].devices or regions[].mesh.")


_FORCED = re.compile(r"xla_force_host_platform_device_count=(\d+)")


def accelerators(environment: Mapping[str, str]) -> int | None:
    """Counts devices without asking JAX, which takes seconds; None where none are seen."""
    if forced := _FORCED.search(environment.get("XLA_FLAGS", "")):
        return int(forced[1])
    found = len(glob("/dev/nvidia[0-9]*")) or len(glob("/dev/accel[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if found and visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return found or None
