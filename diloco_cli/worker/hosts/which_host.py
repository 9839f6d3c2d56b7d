"""Which host of its region is this, and where is the first?

What `diloco work` is told decides; what it is not told, whoever started it has said in variables:

    --hosts, --host, --coordinator    or DILOCO_HOSTS, DILOCO_HOST, DILOCO_COORDINATOR
    torchrun                          WORLD_SIZE, RANK, MASTER_ADDR, and the port after MASTER_PORT,
                                      which torchrun may use itself
    a Kubernetes job with indices     JOB_COMPLETION_INDEX; DILOCO_COORDINATOR says where host 0 is
    Slurm                             SLURM_STEP_NUM_TASKS, SLURM_PROCID, the first node of
                                      SLURM_STEP_NODELIST, and a port drawn from the number of job
                                      and step

The spec says how many hosts there are; numbers that differ are an error and never a choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from diloco_cli.errors import SpecError
from diloco_cli.worker.hosts.connection import join_address, split_address

SLURM_PORTS = range(61000, 65000)


@dataclass(frozen=True)
class HostPlace:
    """One host among those of a region."""

    host: int
    hosts: int
    coordinator: str
    """HOST:PORT, where host 0 listens for the others."""

    @property
    def address(self) -> tuple[str, int]:
        return split_address(self.coordinator)


@dataclass(frozen=True)
class _Told:
    """What one source says."""

    source: str
    hosts: int | None = None
    host: int | None = None
    coordinator: str | None = None


def find_place(
    region: str,
    listed: int,
    *,
    hosts: int | None,
    host: int | None,
    coordinator: str | None,
    environment: Mapping[str, str],
) -> HostPlace | None:
    """Says which host this is; None where the region has only one."""
    options = _Told("--hosts", hosts, host, coordinator)
    if listed == 1 and hosts in (None, 1):
        if host or coordinator:
            raise SpecError(
                f"This is said to be host {host or 0} of region {region}, whose spec has no "
                "`hosts`, which means one.",
                hint=f"Set `hosts` of {region} in the spec, with a mesh for all of them.",
            )
        return None  # Whatever a launcher says of other tasks is not about this region.
    told = [options, *_launchers(environment)]
    for each in told:
        if each.hosts is not None and each.hosts != listed:
            raise SpecError(
                f"The spec says that region {region} has {listed} "
                f"{'host' if listed == 1 else 'hosts'}, {each.source} says {each.hosts}.",
                hint=f"Set `hosts` of {region} in the spec of every host to the number that is "
                "started.",
            )
    number = next((each.host for each in told if each.host is not None), None)
    where = next((each.coordinator for each in told if each.coordinator), None)
    if number is None or where is None:
        missing = "Which host" if number is None else "Where host 0"
        raise SpecError(
            f"Region {region} has {listed} hosts. {missing} is, neither an option nor a launcher "
            "says.",
            hint="Start every host with --host K --coordinator HOST:PORT, K from 0; srun and "
            "torchrun say both, a Kubernetes job with indices says K.",
        )
    if not 0 <= number < listed:
        raise SpecError(
            f"This is said to be host {number} of region {region}, which has {listed}: "
            f"0 to {listed - 1}.",
            hint="Hosts are counted from 0.",
        )
    split_address(where)
    return HostPlace(number, listed, where)


def _launchers(environment: Mapping[str, str]) -> list[_Told]:
    """What launchers say, the most deliberate one first."""
    found = []
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        port = _number(environment, "MASTER_PORT") + 1
        found.append(
            _Told(
                "torchrun (WORLD_SIZE)",
                _number(environment, "WORLD_SIZE"),
                _number(environment, "RANK"),
                join_address(environment["MASTER_ADDR"], port),
            )
        )
    elif "JOB_COMPLETION_INDEX" in environment:
        host = _number(environment, "JOB_COMPLETION_INDEX")
        found.append(_Told("Kubernetes (JOB_COMPLETION_INDEX)", host=host))
    elif {"SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"} <= environment.keys():
        job, step = (
            _number(environment, key) if key in environment else 0
            for key in ("SLURM_JOB_ID", "SLURM_STEP_ID")
        )
        port = SLURM_PORTS[(job * 16 + step) % len(SLURM_PORTS)]
        found.append(
            _Told(
                "Slurm (SLURM_STEP_NUM_TASKS)",
                _number(environment, "SLURM_STEP_NUM_TASKS"),
                _number(environment, "SLURM_PROCID"),
                join_address(first_node(environment["SLURM_STEP_NODELIST"]), port),
            )
        )
    return found


def _number(environment: Mapping[str, str], key: str) -> int:
    text = environment.get(key, "")
    if not (text.isascii() and text.isdigit()):
        raise SpecError(
            f"The variable {key} is {text!r}, which is no number.",
            hint="Say --hosts, --host and --coordinator yourself, or mend what sets it.",
        )
    return int(text)


def first_node(nodes: str) -> str:
    """The first of Slurm's list of nodes, as in `gpu[03-07,9],login1`."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if not found:
        raise SpecError(
            f"The variable SLURM_STEP_NODELIST is {nodes!r}, which names no node.",
            hint="Say --coordinator HOST:PORT yourself.",
        )
    return "".join(part or "" for part in found.groups())
