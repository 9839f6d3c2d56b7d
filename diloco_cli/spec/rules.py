"""Which combinations of keys describe a run that cannot work?

A rule looks at a whole spec and yields a fault for each contradiction it finds, so all
of them are reported together. A fault names the keys involved, their values and the
consequence; its hint is the way out. No rule looks inside a `kind`: that is for
`assemble`, which knows the kinds.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from diloco_cli.spec.quantities import DURATION, RATE, rate_of, seconds_of, why_not
from diloco_cli.validation import in_words, nearest

if TYPE_CHECKING:
    from diloco_cli.spec.schema import InnerSpec, MeshSpec, RunSpec

Path = tuple[str | int, ...]
"""Where a value sits in the spec: `("regions", 0, "speed")`."""


MOST_TOKENS = 10**18


@dataclass(frozen=True)
class SpecFault:
    path: Path
    message: str
    hint: str | None = None
    beside: tuple[Path, ...] = ()
    """The other keys the message is about."""

    on_key: bool = False
    """The key itself is wrong, rather than its value."""


class Conflicts(ValueError):
    """Every contradiction of one spec; pydantic carries it to whoever asked for the spec."""

    def __init__(self, spec: RunSpec, faults: Sequence[SpecFault]) -> None:
        super().__init__("; ".join(f"{dotted(fault.path)}: {fault.message}" for fault in faults))
        self.spec, self.faults = spec, tuple(faults)


def dotted(path: Path) -> str:
    return ".".join(str(step) for step in path)


def conflicts(spec: RunSpec) -> list[SpecFault]:
    """Lists every contradiction between the keys of a spec."""
    return [fault for rule in RULES for fault in rule(spec)]


def doubts(spec: RunSpec) -> list[SpecFault]:
    """Lists what a run can work with, but hardly is meant."""
    return [fault for rule in WARNINGS for fault in rule(spec)]


def _regions_differ(spec: RunSpec) -> Iterator[SpecFault]:
    seen: dict[str, int] = {}
    for number, region in enumerate(spec.regions):
        first = seen.setdefault(region.name, number)
        if first != number:
            yield SpecFault(
                ("regions", number, "name"),
                f"is {region.name!r}, as regions.{first}.name already is, so the two would "
                "overwrite each other's work",
                "Give every region a name of its own.",
                (("regions", first, "name"),),
            )


def _quorum_is_reachable(spec: RunSpec) -> Iterator[SpecFault]:
    quorum, count = spec.sync.quorum, len(spec.regions)
    if quorum > count and spec.server.admit == "listed":
        yield SpecFault(
            ("sync", "quorum"),
            f"is {quorum} but regions lists {count}, so no round could ever close",
            f"Set sync.quorum to {count} or less, or list more regions.",
            (("regions",),),
        )


def _quorum_needs_joiners(spec: RunSpec) -> Iterator[SpecFault]:
    quorum, count = spec.sync.quorum, len(spec.regions)
    if quorum > count and spec.server.admit != "listed":
        yield SpecFault(
            ("sync", "quorum"),
            f"is {quorum} but regions lists {count}, so no round closes before others have joined",
            f"Set sync.quorum to {count} or less, unless more regions are sure to come.",
            (("regions",),),
        )


def _fragments_take_turns(spec: RunSpec) -> Iterator[SpecFault]:
    sync = spec.sync
    if sync.fragments > sync.every:
        yield SpecFault(
            ("sync", "fragments"),
            f"is {sync.fragments} but sync.every is {sync.every}, so several fragments would fall "
            "due at the same inner step instead of taking turns",
            f"Set sync.fragments to {sync.every} or less, or sync.every to {sync.fragments} "
            "or more.",
            (("sync", "every"),),
        )


def _answers_come_before_the_next_send(spec: RunSpec) -> Iterator[SpecFault]:
    sync = spec.sync
    if sync.overlap >= sync.every:
        yield SpecFault(
            ("sync", "overlap"),
            f"is {sync.overlap} but sync.every is {sync.every}, so a fragment would be due again "
            "before the answer to its last exchange is expected",
            f"Set sync.overlap below {sync.every}, or raise sync.every.",
            (("sync", "every"),),
        )


def least_tokens(spec: RunSpec) -> int:
    """Tokens of the cheapest round there is: the regions with the smallest batches make the
    quorum. 0 where there are too few regions for one."""
    steps = sorted(inner.batch * inner.sequence for _, inner in _inners(spec))
    quorum = spec.sync.quorum
    return spec.sync.every * sum(steps[:quorum]) if len(steps) >= quorum else 0


def _budget_holds_one_round(spec: RunSpec) -> Iterator[SpecFault]:
    quorum, every, tokens = spec.sync.quorum, spec.sync.every, spec.budget.tokens
    if tokens < (least := least_tokens(spec)):
        owns = [("regions", number, "inner") for number in range(len(spec.regions))]
        yield SpecFault(
            ("budget", "tokens"),
            f"is {tokens} but one round takes at least {least} tokens (sync.quorum {quorum} × "
            f"sync.every {every} × batch × sequence), so the run would end before anything is "
            "merged",
            f"Set budget.tokens to {least} or more, or lower sync.every, inner.batch or "
            "inner.sequence.",
            (("sync", "quorum"), ("sync", "every"), *_STEP_SIZE, *owns),
        )


def _budget_can_be_counted(spec: RunSpec) -> Iterator[SpecFault]:
    if spec.budget.tokens > MOST_TOKENS:
        yield SpecFault(
            ("budget", "tokens"),
            f"is {spec.budget.tokens:,}, more than the {MOST_TOKENS:,} that any run could train",
            "Are there too many zeros? The largest models are trained with some 10^13 tokens.",
        )


def _batches_divide(spec: RunSpec) -> Iterator[SpecFault]:
    asked: list[tuple[Path, InnerSpec]] = [(("inner", "batch"), spec.inner)]
    for path, inner in _inners(spec):
        own = spec.regions[path[1]].inner or {}
        asked += [((*path, key), inner) for key in ("accumulate", "batch") if key in own][-1:]
    for path, inner in asked:
        if inner.batch % inner.accumulate:
            yield SpecFault(
                path,
                f"batch {inner.batch} cannot be cut into accumulate {inner.accumulate} equal parts",
                "Make batch a multiple of accumulate.",
                (("inner", "batch"), ("inner", "accumulate")),
            )


def _batches_are_dealt_out_evenly(spec: RunSpec) -> Iterator[SpecFault]:
    for path, inner in _inners(spec):
        number = path[1]
        mesh, key = _mesh(spec, number)
        shares = mesh.data * mesh.fsdp * inner.accumulate
        # Batches that do not even part into micro-batches are `_batches_divide`'s to report.
        if inner.batch % shares and inner.batch % inner.accumulate == 0:
            parts = f"data {mesh.data} × fsdp {mesh.fsdp}"
            parts += f" × accumulate {inner.accumulate}" if inner.accumulate > 1 else ""
            yield SpecFault(
                ("regions", number, key),
                f"deals batch {inner.batch} out over {parts} = {shares} parts, which does not "
                "come out even",
                f"Make batch a multiple of {shares}, such as {-(-inner.batch // shares) * shares}.",
                (("inner", "batch"), ("inner", "accumulate"), path),
            )


def _a_mesh_is_given_once(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        if region.devices is not None and region.mesh is not None:
            yield SpecFault(
                ("regions", number, "devices"),
                f"is {region.devices}, short for `mesh: {{fsdp: {region.devices}}}`, but mesh is "
                "given too",
                "Keep one of the two.",
                (("regions", number, "mesh"),),
            )


def _checkpoints_go_to_a_folder(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        if (chosen := region.checkpoint) is None:
            continue
        at = ("regions", number, "checkpoint")
        if chosen.to and (bucket := re.match(r"([a-z][a-z0-9+.-]*)://", chosen.to)):
            yield SpecFault(
                (*at, "to"),
                f"is {chosen.to!r}, which begins like the URL of a bucket ({bucket[1]}); "
                "checkpoints are written to folders only",
                "Name a folder that every host of the region reaches, such as a mounted disk.",
            )
        if seconds_of(chosen.every) is None:
            yield _no_duration((*at, "every"), chosen.every)


def _hosts_have_equal_parts(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        mesh, key = _mesh(spec, number)
        if mesh.size % region.host_count:
            least = -(-mesh.size // region.host_count) * region.host_count
            yield SpecFault(
                ("regions", number, "hosts"),
                f"is {region.hosts}, but its {mesh.size} device{'s' if mesh.size > 1 else ''} "
                f"({mesh}) cannot be dealt out over so many hosts in equal parts",
                f"Say how many devices all hosts have together, such as `mesh: {{fsdp: {least}}}`.",
                (("regions", number, key),),
            )


def _hosts_suit_the_trainer(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        if region.host_count == 1:
            continue
        if region.trainer is not None:
            yield SpecFault(
                ("regions", number, "hosts"),
                f"is {region.hosts}, but the region has a trainer of its own, whose processes on "
                "other hosts are its own affair",
                "Remove hosts, and let the program join the region from one of its processes.",
                (("regions", number, "trainer"),),
            )


def _mesh(spec: RunSpec, number: int) -> tuple[MeshSpec, str]:
    """A region's mesh, and the key that says so."""
    region = spec.regions[number]
    return region.devices_by_axis, "devices" if region.mesh is None else "mesh"


def _sequences_are_cut_evenly(spec: RunSpec) -> Iterator[SpecFault]:
    for path, inner in _inners(spec):
        if inner.sequence % inner.loss_chunks:
            own = "loss_chunks" in (spec.regions[path[1]].inner or {})
            at: Path = (*path, "loss_chunks") if own else ("inner", "loss_chunks")
            yield SpecFault(
                at,
                f"is {inner.loss_chunks}, which does not cut a sequence of {inner.sequence} into "
                "equal parts",
                "Choose a divisor of inner.sequence, such as a power of two.",
                (("inner", "sequence"), path),
            )
            if not own:
                return  # The same for every region.


def _attention_suits_the_type(spec: RunSpec) -> Iterator[SpecFault]:
    for path, inner in _inners(spec):
        if inner.attention == "cudnn" and inner.compute != "bfloat16":
            own = {"attention", "compute"} & set(spec.regions[path[1]].inner or {})
            at: Path = (*path, min(own)) if own else ("inner", "attention")
            yield SpecFault(
                at,
                f"cudnn computes attention in bfloat16, but compute is {inner.compute}",
                "Set inner.compute to bfloat16, or leave inner.attention at `auto`.",
                (("inner", "attention"), ("inner", "compute")),
            )
            if not own:
                return


def _regions_change_known_keys(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        try:
            spec.inner.changed(region.inner)
        except ValidationError as error:
            for detail in error.errors():
                message, hint = in_words(detail, list(type(spec.inner).model_fields))
                path = ("regions", number, "inner", *detail["loc"])
                unknown = detail["type"] == "extra_forbidden"
                yield SpecFault(path, message, hint, on_key=unknown)


def _inners(spec: RunSpec) -> Iterator[tuple[tuple[str, int, str], InnerSpec]]:
    """Yields how each region trains, as far as that can be read."""
    for number, region in enumerate(spec.regions):
        try:
            yield ("regions", number, "inner"), spec.inner.changed(region.inner)
        except ValidationError:
            continue  # `_regions_change_known_keys` says why.


def _momentum_is_there_to_keep(spec: RunSpec) -> Iterator[SpecFault]:
    if spec.start and spec.start.momentum == "keep" and spec.start.is_url:
        yield SpecFault(
            ("start", "momentum"),
            f"is keep but start.weights is {spec.start.weights!r}, and a server gives weights only",
            "Name the run's folder on its server's host, or leave start.momentum out.",
            (("start", "weights"),),
        )


def _the_evaluator_exists(spec: RunSpec) -> Iterator[SpecFault]:
    names = [region.name for region in spec.regions]
    asked, listed = spec.evaluate.region, spec.server.admit == "listed"
    if asked is not None and asked not in names and listed:
        yield SpecFault(
            ("evaluate", "region"),
            f"is {asked!r}, which is no region of this run, so nobody would evaluate",
            nearest(asked, names, "The regions are"),
            (("regions",),),
        )


def _grace_options_have_an_effect(spec: RunSpec) -> Iterator[SpecFault]:
    grace = spec.sync.grace
    for option, kind in (("margin", "adaptive"), ("seconds", "fixed")):
        if option in grace.model_fields_set and grace.kind != kind:
            yield SpecFault(
                ("sync", "grace", option),
                f"belongs to `kind: {kind}` but sync.grace.kind is `{grace.kind}`, so it would "
                "have no effect",
                f"Remove {option}, or set sync.grace.kind to {kind}.",
                (("sync", "grace", "kind"),),
            )
    if "blend" in spec.sync.model_fields_set and spec.sync.adopt != "blend":
        yield SpecFault(
            ("sync", "blend"),
            f"belongs to `adopt: blend` but sync.adopt is `{spec.sync.adopt}`, so it would have "
            "no effect",
            "Remove blend, or set sync.adopt to blend.",
            (("sync", "adopt"),),
        )


def _the_server_listens_where_it_is_safe(spec: RunSpec) -> Iterator[SpecFault]:
    listen, at = spec.server.listen, ("server", "listen")
    host, port = _host_and_port(listen)
    if host is None:
        yield SpecFault(
            at,
            f"is {listen!r}, which is not HOST:PORT",
            "For example 127.0.0.1:7350, or 127.0.0.1:0 for a free port; an IPv6 host goes in "
            "brackets, as in [::1]:7350.",
        )
    health = spec.server.health
    if health is not None and _host_and_port(health)[0] is None:
        yield SpecFault(
            ("server", "health"), f"is {health!r}, which is not HOST:PORT", "As in 127.0.0.1:7351."
        )
    if host is not None and not _is_loopback(host) and not spec.server.certs:
        yield SpecFault(
            at,
            f"is {listen!r}, which other machines can reach, but there is no server.certs, so "
            "anybody could read and change the run",
            "`diloco certs init`, then server.certs: certs; or listen on "
            f"127.0.0.1:{port or 7350} and let regions come through SSH tunnels.",
        )


def _admission_is_guarded(spec: RunSpec) -> Iterator[SpecFault]:
    server, at = spec.server, ("server", "admit")
    host, _ = _host_and_port(server.listen)
    if server.admit == "credentialed" and not server.certs:
        yield SpecFault(
            at,
            "is credentialed, but there is no server.certs, so there are no credentials",
            "`diloco certs init`, then server.certs: certs; or admit: open, on loopback.",
            (("server", "certs"),),
        )
    if server.admit == "open" and (server.certs or (host and not _is_loopback(host))):
        other = f"server.listen is {server.listen!r}"
        yield SpecFault(
            at,
            f"is open, but {'server.certs is given' if server.certs else other}: anybody may "
            "join on loopback only",
            "Use credentialed: whoever has a credential of the run joins under its name.",
            (("server", "certs"), ("server", "listen")),
        )


def _silence_is_forgotten_after_the_lease(spec: RunSpec) -> Iterator[SpecFault]:
    text, at = spec.server.forget, ("server", "forget")
    seconds = seconds_of(text)
    if seconds is None:
        yield _no_duration(at, text)
    elif seconds <= spec.server.lease:
        yield SpecFault(
            at,
            f"is {text}, no longer than server.lease, {spec.server.lease:g} s, so a region would "
            "be retired as soon as it is late",
            "Give it days, or at least several leases.",
            (("server", "lease"),),
        )


def _a_token_comes_from_one_place(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        if region.token_file and region.token_env:
            yield SpecFault(
                ("regions", number, "token_env"),
                f"is {region.token_env!r}, but token_file is given too",
                "Keep one of the two.",
                (("regions", number, "token_file"),),
            )


def _a_trainer_is_started_or_attaches(spec: RunSpec) -> Iterator[SpecFault]:
    for number, region in enumerate(spec.regions):
        if (trainer := region.trainer) is None:
            continue
        at = ("regions", number, "trainer")
        if (trainer.command is None) == (not trainer.attach):
            both = "gives both a command and attach" if trainer.attach else "gives no command"
            yield SpecFault(
                at,
                both,
                "Write `command: [python, train.py]` to have it started, or `attach: true` if you "
                "start it yourself.",
            )
        if seconds_of(trainer.patience) is None:
            yield _no_duration((*at, "patience"), trainer.patience)
        if region.mesh is not None or region.devices is not None:
            yield SpecFault(
                ("regions", number, "mesh" if region.mesh else "devices"),
                "is for the built-in trainer, but this region has a trainer of its own",
                "Remove it; your program decides on which devices it trains.",
                (at,),
            )
        if region.checkpoint is not None:
            yield SpecFault(
                ("regions", number, "checkpoint"),
                "is for the built-in trainer, but this region has a trainer of its own",
                "Remove it; what is not sent yet is kept in the region's own folder.",
                (at,),
            )


def _host_and_port(listen: str) -> tuple[str | None, int]:
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None, 0
    good = colon and host and port.isascii() and port.isdigit() and int(port) < 2**16
    return (host, int(port)) if good else (None, 0)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_duration(path: Path, text: str) -> SpecFault:
    message = f"is {text!r}, which is no duration{why_not(DURATION, text)}"
    return SpecFault(path, message, DURATION.hint)


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)(?:/s)?")


def _the_rate_limit_is_a_rate(spec: RunSpec) -> Iterator[SpecFault]:
    text = spec.wire.rate_limit
    if text is None or rate_of(text) is not None:
        return
    found = _RATE.fullmatch(text.strip())
    hint = "Write bits per second with their unit, for example 50Mbit or 1.5Gbit."
    if found and float(found[1]) > 0 and found[2] not in RATE.units:
        unit = found[2].removesuffix("ps")
        meant = next((each for each in RATE.units if each.lower() == unit.lower()), None)
        meant = meant or {"b": "bit", "kb": "kbit", "mb": "Mbit", "gb": "Gbit"}.get(unit.lower())
        hint = f"Did you mean `{found[1]}{meant}`? Rates are in bits." if meant else hint
    why = why_not(RATE, text.strip().removesuffix("/s"))
    yield SpecFault(("wire", "rate_limit"), f"is {text!r}, which is no rate{why}", hint)


def _reserved_keys_are_empty(spec: RunSpec) -> Iterator[SpecFault]:
    if spec.export:
        yield SpecFault(
            ("export",),
            "is not available in this version; the key is reserved",
            "Remove export from the spec.",
        )


_STEP_SIZE: tuple[Path, ...] = (("inner", "batch"), ("inner", "sequence"))

RULES: tuple[Callable[[RunSpec], Iterator[SpecFault]], ...] = (
    _regions_differ,
    _regions_change_known_keys,
    _batches_divide,
    _a_mesh_is_given_once,
    _hosts_have_equal_parts,
    _hosts_suit_the_trainer,
    _batches_are_dealt_out_evenly,
    _checkpoints_go_to_a_folder,
    _sequences_are_cut_evenly,
    _attention_suits_the_type,
    _quorum_is_reachable,
    _fragments_take_turns,
    _answers_come_before_the_next_send,
    _budget_holds_one_round,
    _budget_can_be_counted,
    _grace_options_have_an_effect,
    _the_server_listens_where_it_is_safe,
    _admission_is_guarded,
    _silence_is_forgotten_after_the_lease,
    _a_token_comes_from_one_place,
    _a_trainer_is_started_or_attaches,
    _momentum_is_there_to_keep,
    _the_evaluator_exists,
    _the_rate_limit_is_a_rate,
    _reserved_keys_are_empty,
)

WARNINGS: tuple[Callable[[RunSpec], Iterator[SpecFault]], ...] = (_quorum_needs_joiners,)
