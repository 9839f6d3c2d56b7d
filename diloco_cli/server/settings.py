"""The settings of a server, apart from its folder: the spec and the parts it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diloco_cli.core.fragments import Layout, Tensor, cut
from diloco_cli.core.rounds import Receipt
from diloco_cli.merge import MergeRule, OuterOptimizer, merge_rules, outer_optimizers
from diloco_cli.merge.rules import weight
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.codecs import Codec, codecs


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
    settings: dict[str, Any]
    """Those settings, for `GET /v1/run`."""

    @classmethod
    def of(
        cls, spec: RunSpec, tensors: Sequence[Tensor], shared: dict[str, Any] | None = None
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

    @cached_property
    def step_tokens(self) -> dict[str, int]:
        """Tokens per step of each region."""
        inner = {region.name: self.spec.inner_of(region.name) for region in self.spec.regions}
        return {name: spec.batch * spec.sequence for name, spec in inner.items()}

    @property
    def steps_cap(self) -> float:
        """Steps beyond which a contribution counts no more."""
        return float((self.spec.sync.staleness + 1) * self.spec.sync.every)

    def weight(self, receipt: Receipt) -> float:
        """Says how much a contribution counts in its round.

        Never for larger batches than the spec gives its region: weight grows with their square,
        and no region may outvote the others by claiming more.
        """
        tokens = min(receipt.tokens, receipt.steps * self.step_tokens[receipt.region])
        return weight(tokens, receipt.steps, steps_cap=self.steps_cap)


def settings_digest(settings: dict[str, Any]) -> str:
    """Equal digests mean runs whose contributions can be merged."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
