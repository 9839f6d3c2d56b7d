"""Is this host ready? What can be seen here, without asking anybody."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from diloco_cli.observe.units import bytes_
from diloco_cli.plan.devices import USABLE, DeviceNeeds
from diloco_cli.plan.plan import Plan
from diloco_cli.server.store import stores

PACKAGES = ("diloco-cli", "jax", "numpy", "numba", "httpx", "pyreqwest", "granian", "zstandard")
FILES = 1024
"""Open files that a server of many regions may come to."""
INODES = 10_000
DEVICES = """
import json, jax
found = jax.devices()
limit = (found[0].memory_stats() or {}).get("bytes_limit")
print(json.dumps([len(found), found[0].platform, found[0].device_kind, limit]))
"""
DEVICE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """What JAX sees on this host."""

    count: int
    platform: str
    kind: str
    memory: float | None
    """Bytes of each, where they say."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "warn", "fail"]
    said: str
    fix: str = ""

    def as_data(self) -> dict[str, str]:
        return asdict(self)


def host(folder: Path) -> Iterator[Check]:
    """What matters for any run."""
    yield _versions()
    yield _cores()
    yield _files()
    yield _inodes(folder)


def _versions() -> Check:
    installed, missing = [], []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    if missing:
        fix = "Install diloco anew in this environment: make install."
        return Check("versions", "fail", f"{', '.join(missing)} is not installed", fix)
    return Check("versions", "ok", ", ".join([python, *installed]))


def _cores() -> Check:
    from diloco_cli.launch.cores import my_cores

    count = len(my_cores())
    if count < 2:
        fix = "Trainer and agent share it; give the region a second core."
        return Check("cores", "warn", "1 core may be used", fix)
    return Check("cores", "ok", f"{count} cores may be used")


def _files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        fix = f"ulimit -n {FILES if hard < 0 else min(hard, FILES)}"
        return Check("open files", "warn", f"{soft} files may be open at once", fix)
    return Check("open files", "ok", f"{soft if soft >= 0 else 'any number of'} files may be open")


def _inodes(folder: Path) -> Check:
    left = os.statvfs(existing(folder)).f_favail
    if 0 < left < INODES:
        fix = f"Remove small files from the disk of {folder}, or use another with --dir."
        return Check("inodes", "fail", f"{left:,} inodes are left for {folder}", fix)
    return Check("inodes", "ok", f"{left:,} inodes are left" if left else "the disk counts none")


def existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


# Against a spec


def against(
    plan: Plan, folder: Path, *, serves: bool, region: str | None = None
) -> Iterator[Check]:
    """What this run needs of this host; `serves`: the server is to run here as well.

    Without a region the host is to do for any of them.
    """
    devices = _ask_jax()
    needs = [one for one in plan.devices if region in (None, one.region)]
    yield _disk(plan, folder, serves=serves)
    on_host = devices is None or devices.platform == "cpu"
    yield _memory(plan, needs if on_host else [], serves=serves)
    yield _devices(needs, devices)
    if serves:
        yield _port(plan.spec.server.listen)


def _disk(plan: Plan, folder: Path, *, serves: bool) -> Check:
    free = shutil.disk_usage(existing(folder)).free
    # A checkpoint and its successor, images, and the frames that wait.
    need = 2 * plan.memory.host + plan.scenario.parameters * (4 + plan.scenario.up_bits / 8)
    need += plan.memory.server_disk + _reserve(plan) if serves else 0
    text = f"{bytes_(free)} are free for {folder}, about {bytes_(need)} are needed"
    if free < need:
        return Check("disk", "fail", text, "Make room, or use another disk with --dir.")
    return Check("disk", "ok" if free > 2 * need else "warn", text, "It will be nearly full.")


def _reserve(plan: Plan) -> int:
    """What the server never fills."""
    return int(getattr(stores.build(plan.spec.server.store), "reserve", 0))


def _memory(plan: Plan, devices: Sequence[DeviceNeeds], *, serves: bool) -> Check:
    """`devices` have no memory of their own and use the host's."""
    import psutil

    free = psutil.virtual_memory().available
    need = plan.memory.host + (plan.memory.server if serves else 0)
    need += max((one.devices * one.total for one in devices), default=0.0)
    text = f"{bytes_(free)} are free, about {bytes_(need)} are needed by one region"
    text += " and the server" if serves else ""
    if free < need:
        fix = "A smaller model or batch, more inner.accumulate, or a larger machine."
        return Check("memory", "fail", text, fix)
    return Check("memory", "ok", text)


def _ask_jax() -> FoundDevices | None:
    """Asks in a process of its own, so that this one stays light."""
    try:
        command = [sys.executable, "-c", DEVICES]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_SECONDS)
        return FoundDevices(*json.loads(ended.stdout.splitlines()[-1]))
    except (OSError, ValueError, IndexError, TypeError, subprocess.TimeoutExpired):
        return None


def _devices(needs: Sequence[DeviceNeeds], devices: FoundDevices | None) -> Check:
    fix = "Install the extra of your accelerator: pip install 'diloco-cli[cuda]' or '[tpu]'."
    if devices is None:
        return Check("devices", "fail", "JAX finds no device here", fix)
    most = max(needs, key=lambda one: one.devices)
    text = f"{devices.count} of kind {devices.kind}, {most.devices} asked for by {most.region}"
    if devices.count < most.devices:
        change = "Lower regions[].mesh (or devices), or use another host."
        return Check("devices", "fail", text, change)
    fullest = max(needs, key=lambda one: one.total)
    if devices.memory is not None:
        text += f"; {bytes_(fullest.total)} of {bytes_(devices.memory)} needed on each"
        if fullest.total > USABLE * devices.memory:
            change = f"`diloco plan --device {devices.memory / 1e9:.0f}GB` says what to change."
            return Check("devices", "fail", text, change)
    if devices.count > most.devices:
        idle = devices.count - most.devices
        change = "Raise regions[].devices or regions[].mesh."
        return Check("devices", "warn", f"{text}: {idle} will stand idle", change)
    if devices.platform == "cpu" and fullest.total > 4e9:
        return Check("devices", "warn", f"{text}; this model is large for a processor", fix)
    return Check("devices", "ok", text)


def _port(listen: str) -> Check:
    name, _, port = listen.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((name.strip("[]"), int(port)))
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        fix = "Stop what listens there, or set server.listen to another port (0: any free one)."
        why = "somebody listens there already" if busy else str(error.strerror or error)
        return Check("port", "fail", f"{listen} cannot be used: {why}", fix)
    return Check("port", "ok", f"{listen} is free")


def summary(checks: list[Check]) -> dict[str, object]:
    return {
        "ok": all(check.state != "fail" for check in checks),
        "checks": [check.as_data() for check in checks],
    }
