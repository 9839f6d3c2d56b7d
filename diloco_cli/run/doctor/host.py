"""Is this host ready? What can be seen here, without asking anybody."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from diloco_cli.observe.units import bytes_
from diloco_cli.plan.plan import Plan

PACKAGES = ("diloco-cli", "jax", "numpy", "numba", "httpx", "pyreqwest", "granian", "zstandard")
FILES = 1024
"""Open files that a server of many regions may come to."""
INODES = 10_000
DEVICES = "import json, jax; d = jax.devices(); print(json.dumps([len(d), d[0].platform]))"
DEVICE_SECONDS = 120.0


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
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    if missing:
        fix = "Install diloco anew in this environment: make install."
        return Check("versions", "fail", f"{', '.join(missing)} is not installed", fix)
    return Check("versions", "ok", ", ".join([python, *found]))


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
    left = os.statvfs(_existing(folder)).f_favail
    if 0 < left < INODES:
        fix = f"Remove small files from the disk of {folder}, or use another with --dir."
        return Check("inodes", "fail", f"{left:,} inodes are left for {folder}", fix)
    return Check("inodes", "ok", f"{left:,} inodes are left" if left else "the disk counts none")


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


# Against a spec


def against(found: Plan, folder: Path, *, serves: bool) -> Iterator[Check]:
    """What this run needs of this host; `serves`: the server is to run here as well."""
    devices = _ask_jax()
    yield _disk(found, folder, serves=serves)
    yield _memory(found, serves=serves, trains_here=devices is None or devices[1] == "cpu")
    yield _devices(found, devices)
    if serves:
        yield _port(found.spec.server.listen)


def _disk(found: Plan, folder: Path, *, serves: bool) -> Check:
    free = shutil.disk_usage(_existing(folder)).free
    # A checkpoint and its successor, images, and the frames that wait.
    need = 2 * found.memory.host + found.scenario.parameters * (4 + found.scenario.up_bits / 8)
    need += found.memory.server_disk if serves else 0
    said = f"{bytes_(free)} are free for {folder}, about {bytes_(need)} are needed"
    if free < need:
        return Check("disk", "fail", said, "Make room, or use another disk with --dir.")
    return Check("disk", "ok" if free > 2 * need else "warn", said, "It will be nearly full.")


def _memory(found: Plan, *, serves: bool, trains_here: bool) -> Check:
    import psutil

    free = psutil.virtual_memory().available
    need = found.memory.host + (found.memory.server if serves else 0)
    if trains_here:  # No accelerator with a memory of its own.
        need += found.memory.device + found.memory.activations
    said = f"{bytes_(free)} are free, about {bytes_(need)} are needed by one region"
    said += " and the server" if serves else ""
    if free < need:
        fix = "A smaller model or batch, more inner.accumulate, or a larger machine."
        return Check("memory", "fail", said, fix)
    return Check("memory", "ok", said)


def _ask_jax() -> tuple[int, str] | None:
    """Asks in a process of its own, so that this one stays light."""
    try:
        asked = [sys.executable, "-c", DEVICES]
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=DEVICE_SECONDS)
        count, platform = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None
    return int(count), str(platform)


def _devices(found: Plan, devices: tuple[int, str] | None) -> Check:
    fix = "Install the extra of your accelerator: pip install 'diloco-cli[cuda]' or '[tpu]'."
    if devices is None:
        return Check("devices", "fail", "JAX finds no device here", fix)
    count, platform = devices
    need = max(region.devices or 1 for region in found.spec.regions)
    said = f"{count} of kind {platform}, {need} a region asked for"
    if count < need:
        return Check("devices", "fail", said, "Lower regions[].devices, or use another host.")
    if platform == "cpu" and found.memory.device > 4e9:
        return Check("devices", "warn", f"{said}; this model is large for a processor", fix)
    return Check("devices", "ok", said)


def _port(listen: str) -> Check:
    name, _, port = listen.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind((name.strip("[]"), int(port)))
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
