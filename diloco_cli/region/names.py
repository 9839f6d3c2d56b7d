"""What is a tensor called on the wire, and which way round is it there?

Regions of one run may be trained with different frameworks. They meet in one layout: each maps
the names of the run's model to its own, and says which matrices it has the other way round.

    names = {"embed": "tok.weight", "w1": Transposed("fc1.weight")}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_cli.errors import SpecError
from diloco_cli.models import models
from diloco_cli.models.hf.families import config_of, places_of
from diloco_cli.models.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix that has its axes the other way round on the wire."""

    name: str


Names = Mapping[str, str | Transposed]
"""By the name on the wire: the name in the framework."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor of the wire is found in a framework."""

    name: str
    transposed: bool = False
    embedding: bool = False


def sources(
    known: Iterable[str], names: Names | None, embeddings: Collection[str]
) -> dict[str, TensorSource]:
    """Where each tensor of the wire is found; without `names` each has its own name there."""
    known = list(known)
    if names is None:
        names = {name: name for name in known}
    used: dict[str, str] = {}
    found: dict[str, TensorSource] = {}
    for wire, own in names.items():
        turned = isinstance(own, Transposed)
        name = own.name if turned else own
        if name not in known:
            raise SpecError(
                f"names: {wire} is mapped to {name!r}, which these weights do not have.",
                hint=f"They have {', '.join(known[:8])}{', …' if len(known) > 8 else ''}.",
            )
        if name in used:
            raise SpecError(
                f"names: {used[name]} and {wire} are both mapped to {name!r}.",
                hint="Weights that are tied have one name on the wire.",
            )
        used[name] = wire
        found[wire] = TensorSource(name, turned, wire in embeddings)
    if left := [name for name in known if name not in used]:
        raise SpecError(
            f"names: {left[0]!r} has no name on the wire, so it would be trained in this region "
            f"alone{f' ({len(left)} are left out)' if len(left) > 1 else ''}.",
            hint="Map every parameter, or freeze those that are not trained.",
        )
    if unknown := sorted(set(embeddings) - found.keys()):
        raise SpecError(
            f"embeddings: {unknown[0]!r} is no tensor on the wire.",
            hint=f"They are {', '.join(sorted(found)[:8])}{', …' if len(found) > 8 else ''}.",
        )
    return found


def transformers_names(model: Mapping[str, Any], *, sequence: int) -> tuple[dict[str, Any], Names]:
    """The config and the names of one of our own models in transformers.

    `model` is that of the run's spec, `sequence` the longest that is trained.
    """
    built = models.build(model)
    config = config_of(built, sequence=sequence)
    assert isinstance(built, Transformer)
    names: dict[str, str | Transposed] = {}
    for tensor in built.tensors():
        place = places_of(built.shape, tensor.name)
        names[tensor.name] = Transposed(place.name) if place.transposed else place.name
    return config, names
