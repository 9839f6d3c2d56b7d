"""The settings of a server, apart from its folder: the spec and the parts it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from diloco_cli.core.fragments import Layout, Tensor, cut
from diloco_cli.core.rounds import Receipt
from diloco_cli.core.terms import Settings
from diloco_cli.core.unmerged_work import Work
from diloco_cli.merge import MergeRule, OuterOptimizer, merge_rules, outer_optimizers
from diloco_cli.merge.rules import length_share, weight
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.codecs import Codec, codecs

LEAST_STEPS = 1e-6
"""Of a member's weight; no step at all would be no number."""


@dataclass(frozen=True)
class ServerSettings:
    """The parts of one run that its server needs."""

    spec: RunSpec
    layout: Layout
    up: Codec
    merge: MergeRule
    outer: OuterOptimizer
    spec_digest: str
    """Of the settings every region must share."""
    settings: Settings
    """Those settings, for `GET /v1/run`."""
    former: Mapping[str, int] = field(default_factory=dict)
    """Tokens per step of regions that earlier terms had."""

    @classmethod
    def of(
        cls, spec: RunSpec, tensors: Sequence[Tensor], shared: Settings | None = None
    ) -> ServerSettings:
        """Builds what the spec names, for a model of these tensors.

        `shared` is what every region must share; only the run's name when left out.
        """
        shared = shared or {"name": spec.name}
        return cls(
            spec=spec,
            layout=cut(tensors, spec.sync.fragments),
            up=codecs.build(spec.wire.up),
            merge=merge_rules.build(spec.merge),
            outer=outer_optimizers.build(spec.outer),
            spec_digest=settings_digest(shared),
            settings=shared,
        )

    @cached_property
    def sizes(self) -> list[int]:
        return [fragment.size for fragment in self.layout.fragments]

    def amended(self, spec: RunSpec, shared: Settings | None = None) -> ServerSettings:
        """The same run under other terms; the layout is cut by keys that never change."""
        shared = shared or {"name": spec.name}
        return replace(
            self,
            spec=spec,
            up=codecs.build(spec.wire.up),
            merge=merge_rules.build(spec.merge),
            outer=outer_optimizers.build(spec.outer),
            spec_digest=settings_digest(shared),
            settings=shared,
            former={**self.former, **self._listed},
        )

    @cached_property
    def _listed(self) -> dict[str, int]:
        inner = {region.name: self.spec.inner_of(region.name) for region in self.spec.regions}
        return {name: spec.batch * spec.sequence for name, spec in inner.items()}

    def step_tokens(self, region: str) -> int:
        """Tokens per step of a region; one that no terms list trains as the run does."""
        if (tokens := self._listed.get(region, self.former.get(region))) is not None:
            return tokens
        return self.spec.inner.batch * self.spec.inner.sequence

    @property
    def steps_cap(self) -> float:
        """Steps beyond which a contribution counts no more."""
        return float((self.spec.sync.staleness + 1) * self.spec.sync.every)

    @cached_property
    def paces(self) -> dict[str, float]:
        """Steps per second of the regions for which the spec says it."""
        return {region.name: region.pace for region in self.spec.regions if region.pace}

    def weight(self, receipt: Receipt) -> float:
        """Says how much a contribution counts in its round.

        Never for larger batches than the spec gives its region: weight grows with their square,
        and no region may outvote the others by claiming more. One of which nothing counts is
        merged all the same, with next to no weight.
        """
        worth = receipt.worth
        if worth.steps < LEAST_STEPS:
            worth = Work(receipt.tokens, receipt.steps).scaled(LEAST_STEPS / receipt.steps)
        tokens = min(worth.tokens, worth.steps * self.step_tokens(receipt.region))
        return weight(tokens, worth.steps, steps_cap=self.steps_cap)

    def scale(self, receipt: Receipt) -> float:
        """Says what a contribution's values are multiplied with before they are merged."""
        return length_share(receipt.steps, steps_cap=self.steps_cap)


def settings_digest(settings: Settings) -> str:
    """Equal digests mean runs whose contributions can be merged."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
