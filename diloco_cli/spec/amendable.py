"""Which keys may change in a run that has begun, and when does a change take effect?

One table answers for every key of the spec; a test refuses a key that no row speaks of. Rows
name keys as `--set` does, with `*` for the name of a region. A row for a section or a choice of
kind speaks of everything below it, unless a longer row does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

When = Literal["never", "server", "version", "region", "own", "host"]

IN_WORDS: dict[When, str] = {
    "never": "never",
    "server": "at once",
    "version": "with the next version of each fragment",
    "region": "when a region's trainer starts again, which it does by itself",
    "own": "in the region's own file",
    "host": "at the server's next start",
}


@dataclass(frozen=True)
class ChangeRule:
    """When a change of a key takes effect, or why there is none."""

    when: tuple[When, ...]
    why: str = ""
    """never, own: the reason."""
    instead: str = ""
    """never, own: what to do instead."""

    @property
    def allowed(self) -> bool:
        return not {"never", "own"} & set(self.when)

    @property
    def in_words(self) -> str:
        if self.allowed:
            return " and ".join(IN_WORDS[when] for when in self.when)
        return f"{IN_WORDS[self.when[0]]}: {self.why}" if self.why else IN_WORDS[self.when[0]]


_NEW_RUN = "Begin a new run from this one's weights: `start: {weights: FOLDER}`."
_OWN = "Change it in the spec file of that region's host and start its worker again."


def _never(why: str, instead: str = _NEW_RUN) -> ChangeRule:
    return ChangeRule(("never",), why, instead)


def _own(why: str = "it is a matter of that host") -> ChangeRule:
    return ChangeRule(("own",), why, _OWN)


_LAYOUT = _never("every version, digest and frame on its way is cut by it")
_MEANING = _never("what a token means, and what was never trained on, must stay as it was")
_SERVER, _VERSION = ChangeRule(("server",)), ChangeRule(("version",))
_REGION, _HOST = ChangeRule(("region",)), ChangeRule(("host",))
_LISTED = _never(
    "regions are added and removed by name", "Use --add-region NAME or --remove-region NAME."
)

RULES: dict[str, ChangeRule] = {
    "spec": _never("it is the version of the format"),
    "name": _never("folders, credentials and reports go by it"),
    "seed": _never("the first weights and the order of the data follow from it"),
    "start": _never("version 0 was made of it"),
    "budget.tokens": ChangeRule(("server", "region")),
    "model": _LAYOUT,
    "data": _REGION,
    "data.kind": _REGION,
    "data.tokenizer": _MEANING,
    "data.tokenizer.file": _REGION,
    "data.heldout": _MEANING,
    "data.lanes": _SERVER,
    "inner.batch": _REGION,
    "inner.sequence": _REGION,
    "inner.accumulate": _REGION,
    "inner.compute": _REGION,
    "inner.remat": _REGION,
    "inner.loss_chunks": _REGION,
    "inner.attention": _REGION,
    "inner.clip": _REGION,
    "inner.optimizer": _REGION,
    "inner.schedule": _REGION,
    "regions": _LISTED,
    "regions.*.name": _never(
        "work sent under the old name could be merged a second time under the new one",
        "Add a region under the new name and remove the old one.",
    ),
    "regions.*.data": _REGION,
    "regions.*.inner": _REGION,
    "regions.*.token_file": _own(),
    "regions.*.token_env": _own(),
    "regions.*.devices": _own(),
    "regions.*.mesh": _own(),
    "regions.*.trainer": _own(),
    "regions.*.checkpoint": _own(),
    "regions.*.hosts": _own(),
    "regions.*.speed": _own(),
    "regions.*.pace": _SERVER,
    "sync.fragments": _LAYOUT,
    "sync.every": ChangeRule(("server", "version")),
    "sync.overlap": ChangeRule(("region", "server")),
    "sync.quorum": _SERVER,
    "sync.grace": _SERVER,
    "sync.staleness": ChangeRule(("server", "version")),
    "sync.adopt": ChangeRule(("region", "server")),
    "sync.blend": ChangeRule(("region", "server")),
    "merge": _VERSION,
    "outer": _VERSION,
    "wire.up": _REGION,
    "wire.down": _VERSION,
    "wire.zstd": ChangeRule(("version", "region")),
    "wire.rate_limit": _own("how much of its line a region may use is between the two"),
    "server.listen": _HOST,
    "server.health": _HOST,
    "server.certs": _HOST,
    "server.store": _HOST,
    "server.lease": _SERVER,
    "server.grant": _SERVER,
    "server.admit": _SERVER,
    "server.members": _SERVER,
    "server.forget": _SERVER,
    "server.guard": ChangeRule(("server", "version")),
    "evaluate.every": _REGION,
    "evaluate.batches": _REGION,
    "evaluate.region": _SERVER,
    "evaluate.sample": _REGION,
    "export": _own("nothing reads it yet"),
    "chaos": _own("it belongs to `diloco chaos`"),
    "plugins": ChangeRule(("host", "region")),
}


def rule_of(key: str) -> ChangeRule | None:
    """The rule of a dotted key; None for one that no row speaks of."""
    steps = key.split(".")
    if steps[0] == "regions" and len(steps) > 1:
        steps[1] = "*"
    for end in range(len(steps), 0, -1):
        prefix = ".".join(steps[:end])
        # `regions` says how the list changes, and nothing about what is in it.
        if prefix in RULES and (prefix != "regions" or len(steps) == 1):
            return RULES[prefix]
    return None


def changes_in_a_run(key: str) -> bool:
    """Says whether a key may differ between two starts of a worker, as far as its folder goes."""
    rule = rule_of(key)
    return key.startswith("regions.") or (rule is not None and rule.when != ("never",))


AGENTS = ("regions.*.token_file", "regions.*.token_env", "wire.rate_limit", "export")
"""Keys of a region's own that its trainer has no use for."""


def trainer_reads(key: str, region: str) -> bool:
    """Says whether the trainer of a region works by this key, and starts anew when it changes."""
    steps = key.split(".")
    if steps[0] == "regions":
        if len(steps) < 3 or steps[1] != region:
            return False  # What the others do shows in the versions they make.
        steps[1] = "*"
    rule = rule_of(key)
    when = rule.when if rule else ("never",)
    return bool({"never", "region", "own"} & set(when)) and ".".join(steps) not in AGENTS
