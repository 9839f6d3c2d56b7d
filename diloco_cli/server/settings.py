"""What a server is made of, apart from its folder: the spec and the parts it names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diloco_cli.core.fragments import Layout
from diloco_cli.core.rounds import Receipt
from diloco_cli.merge import MergeRule, OuterOptimizer
from diloco_cli.merge.rules import weight
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.codecs import Codec


@dataclass(frozen=True)
class ServerSettings:
    """The parts of one run that its server needs; `assemble` puts it together."""

    spec: RunSpec
    layout: Layout
    up: Codec
    merge: MergeRule
    outer: OuterOptimizer
    spec_digest: str
    """Of the settings every region must share."""
    settings: dict[str, Any]
    """Those settings, for `GET /v1/run`."""

    @cached_property
    def sizes(self) -> list[int]:
        return [fragment.size for fragment in self.layout.fragments]

    @cached_property
    def step_tokens(self) -> dict[str, int]:
        """Tokens that a step of each region has."""
        inner = {region.name: self.spec.inner_of(region.name) for region in self.spec.regions}
        return {name: each.batch * each.sequence for name, each in inner.items()}

    @property
    def steps_cap(self) -> float:
        """Steps beyond which a contribution counts no more."""
        return float((self.spec.sync.staleness + 1) * self.spec.sync.every)

    def weight(self, receipt: Receipt) -> float:
        """Says how much a contribution counts in its round.

        Never for larger batches than this spec gives its region: weight grows with their
        square, and nobody is to outvote the others by a claim.
        """
        tokens = min(receipt.tokens, receipt.steps * self.step_tokens[receipt.region])
        return weight(tokens, receipt.steps, steps_cap=self.steps_cap)
