"""The composition root: a run spec becomes live objects.

Only here do names meet the things they name. Everything is importable without JAX;
a model or an optimizer loads it when it is told to train.

    RunSpec ──seams──▶ codecs, merge rule, outer optimiser, model ──cut──▶ layout
                  ╰──▶ or every fault at once, each at its key
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

from diloco_cli.core.fragments import Layout, cut
from diloco_cli.core.terms import Settings
from diloco_cli.data import Dataset, NamesTokenizer, datasets, tokenizers
from diloco_cli.errors import RegistryError
from diloco_cli.merge import MergeRule, OuterOptimizer, merge_rules, outer_optimizers
from diloco_cli.models import Described, Model, Partitioned, models, parameters
from diloco_cli.models.tensors import TensorsModel
from diloco_cli.registry import Registry
from diloco_cli.server.settings import ServerSettings, settings_digest
from diloco_cli.server.store import stores
from diloco_cli.spec.load import Loaded, check_spec, load_spec
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.rules import Path, SpecFault
from diloco_cli.spec.schema import Choice, InnerSpec, RunSpec
from diloco_cli.wire.codecs import Codec, codecs
from diloco_cli.worker.engines.optimizers import optimizers, schedules

SEAMS: dict[str, Registry[Any]] = {
    "codec": codecs,
    "merge": merge_rules,
    "outer": outer_optimizers,
    "model": models,
    "data": datasets,
    "tokenizer": tokenizers,
    "optimizer": optimizers,
    "schedule": schedules,
    "store": stores,
}
"""What can be chosen by `kind`, under the names `diloco explain` knows."""

MOST_PARAMETERS, MOST_LAYERS = 2**41, 10_000

SHARED = ("spec", "name", "seed", "budget", "model", "sync", "merge", "outer", "wire")
"""What every process of a run must agree on; data, inner steps and devices are a region's own."""


@dataclass(frozen=True)
class RunObjects:
    """What the numbers of a run are made with."""

    model: Model
    layout: Layout
    up: Codec
    down: Codec
    merge: MergeRule
    outer: OuterOptimizer


def load_run(path: str | FilePath, overrides: Sequence[str] = ()) -> Loaded:
    """Loads a spec whose every name exists, or raises all that is wrong with it."""
    return load_spec(path, overrides, also=faults)


def resolve(spec: RunSpec) -> RunObjects:
    """Makes the parts that server and workers share."""
    load_plugins(spec)
    model = models.build(spec.model)
    return RunObjects(
        model,
        cut(model.tensors(), spec.sync.fragments),
        codecs.build(spec.wire.up),
        codecs.build(spec.wire.down),
        merge_rules.build(spec.merge),
        outer_optimizers.build(spec.outer),
    )


def fragment_sizes(spec: RunSpec) -> tuple[int, ...]:
    """Parameters of every fragment."""
    return tuple(fragment.size for fragment in resolve(spec).layout.fragments)


def settings_of(spec: RunSpec, parts: RunObjects) -> ServerSettings:
    """Makes what a server needs apart from its folder."""
    return ServerSettings.of(spec, parts.model.tensors(), shared_settings(spec))


def build_terms(last: ServerSettings, data: Mapping[str, Any]) -> ServerSettings:
    """Makes a server's settings for amended terms; raises SpecErrors with all that is wrong."""
    spec = build_amended(data)
    return last.amended(spec, shared_settings(spec))


def build_amended(data: Mapping[str, Any]) -> RunSpec:
    """Makes an amended spec whose every name exists; raises SpecErrors with all that is wrong."""
    return spelled_out(check_spec(data, "the amended spec", also=faults))


def load_plugins(spec: RunSpec) -> None:
    """Imports the run's plugins, so that the kinds they register can be named."""
    for name in spec.plugins:
        importlib.import_module(name)


def faults(spec: RunSpec) -> list[SpecFault]:
    """Lists what is wrong with the kinds a spec names, and with how they fit together."""
    all_faults = list(_plugin_faults(spec))
    built: dict[Path, Any] = {}
    for path, registry, choice in _choices(spec):
        built[path], errors = registry.inspect(choice)
        all_faults += [_misnamed(path, error) for error in errors]
    all_faults += _layout_faults(spec, built["model",])
    all_faults += _vocabulary_faults(built)
    all_faults += _tokenizer_faults(built)
    all_faults += _lane_faults(spec, built["data",])
    all_faults += _form_faults(spec, built["model",])
    return all_faults


def _plugin_faults(spec: RunSpec) -> Iterator[SpecFault]:
    for number, name in enumerate(spec.plugins):
        try:
            importlib.import_module(name)
        # A plugin is somebody else's code: whatever it raises is news about the plugin.
        except Exception as error:
            yield SpecFault(
                ("plugins", number),
                f"{name!r} cannot be imported: {type(error).__name__}: {error}",
                "Install it in the environment that runs diloco, or remove it.",
            )


def _data_choices(spec: RunSpec) -> Iterator[tuple[Path, Registry[Any], Choice]]:
    yield ("data",), datasets, spec.data
    for number, region in enumerate(spec.regions):
        if region.data is not None:
            yield ("regions", number, "data"), datasets, region.data


def _choices(spec: RunSpec) -> Iterator[tuple[Path, Registry[Any], Choice]]:
    """Yields every place of a spec where a kind is chosen."""
    yield ("model",), models, spec.model
    yield from _data_choices(spec)
    yield ("inner", "optimizer"), optimizers, spec.inner.optimizer
    yield ("inner", "schedule"), schedules, spec.inner.schedule
    yield ("merge",), merge_rules, spec.merge
    yield ("outer",), outer_optimizers, spec.outer
    yield ("wire", "up"), codecs, spec.wire.up
    yield ("wire", "down"), codecs, spec.wire.down
    yield ("server", "store"), stores, spec.server.store
    for number, region in enumerate(spec.regions):
        for key, registry in (("optimizer", optimizers), ("schedule", schedules)):
            own = (region.inner or {}).get(key)
            if isinstance(own, dict):
                yield ("regions", number, "inner", key), registry, own


def _misnamed(path: Path, error: RegistryError) -> SpecFault:
    steps = [int(step) if step.isdigit() else step for step in error.key.split(".")]
    on_key = steps[-1] != "kind"
    return SpecFault((*path, *steps), error.message, error.hint, on_key=on_key)


def _layout_faults(spec: RunSpec, model: Model | None) -> Iterator[SpecFault]:
    if model is None:
        return
    # Before its tensors are listed: a list of billions is itself too long.
    if isinstance(model, Described) and model.depth > MOST_LAYERS:
        message = f"is {model.depth:,}, more than the {MOST_LAYERS:,} that can be trained"
        yield SpecFault(("model", "layers"), message, "Are there too many zeros?")
        return
    if (size := parameters(model)) > MOST_PARAMETERS:
        yield SpecFault(
            ("model",),
            f"has {size:,} parameters, more than the {MOST_PARAMETERS:,} that can be exchanged",
            "Lower its width, layers or vocabulary.",
        )
        return
    try:
        cut(model.tensors(), spec.sync.fragments)
    except ValueError as error:
        yield SpecFault(
            ("sync", "fragments"),
            f"is {spec.sync.fragments}, more than this model can fill: {error}",
            "Lower sync.fragments, or choose a larger model.",
            (("model",),),
        )


def _vocabulary_faults(built: dict[Path, Any]) -> Iterator[SpecFault]:
    model = built["model",]
    if not isinstance(model, Described):
        return
    for path, dataset in built.items():
        if path[-1] != "data" or dataset is None or dataset.vocabulary <= model.vocabulary:
            continue
        yield SpecFault(
            ("model", "vocabulary"),
            f"is {model.vocabulary} but the tokenizer of {path[0]} makes {dataset.vocabulary} "
            "different tokens",
            f"Set model.vocabulary to {dataset.vocabulary} or more.",
            (path,),
        )


def _tokenizer_faults(built: dict[Path, Any]) -> Iterator[SpecFault]:
    """Regions whose numbers mean other text than those of a region before them."""
    known = {path: digest for path, digest in _tokenizer_digests(built).items() if digest}
    for path, digest in known.items():
        first, other = next(iter(known.items()))
        if digest != other:
            yield SpecFault(
                (*path, "tokenizer"),
                f"is {digest[:12]}, that of {'.'.join(map(str, first))} is {other[:12]}: "
                "the same number would be other text",
                "Give every region the same tokenizer.",
                (first,),
            )


def _tokenizer_digests(built: dict[Path, Any]) -> dict[Path, str | None]:
    return {
        path: dataset.tokenizer_digest
        for path, dataset in built.items()
        if path[-1] == "data" and isinstance(dataset, NamesTokenizer)
    }


def _lane_faults(spec: RunSpec, dataset: Dataset | None) -> Iterator[SpecFault]:
    readers = [
        region.name for region in spec.regions if region.data is None and region.trainer is None
    ]
    if dataset is not None and len(readers) > dataset.lanes:
        yield SpecFault(
            ("data", "lanes"),
            f"is {dataset.lanes} but {len(readers)} regions read this text, so some would have "
            "nothing to read",
            f"Set data.lanes to {len(readers)} or more.",
            (("regions",),),
        )


def _form_faults(spec: RunSpec, model: Model | None) -> Iterator[SpecFault]:
    """What a region asks of its devices that the model cannot do."""
    if model is None:
        return
    kind = spec.model["kind"]
    for number, region in enumerate(spec.regions):
        if region.trainer is not None:
            continue  # How it trains is its own affair.
        if isinstance(model, TensorsModel):
            yield SpecFault(
                ("regions", number),
                f"{region.name} has no trainer of its own, but a model of kind {kind} has no loss "
                "that the built-in one could train",
                "Add `trainer: {command: [python, train.py]}`, or choose another model.",
                (("model", "kind"),),
            )
            continue
        tensor = region.devices_by_axis.tensor
        if isinstance(model, Partitioned):
            for option, count in model.tensor_counts().items():
                if count % tensor:
                    yield SpecFault(
                        ("regions", number, "mesh", "tensor"),
                        f"is {tensor}, which does not divide the model's {count} {option}",
                        f"Choose a divisor of {count}, or use more fsdp instead.",
                        (("model", option),),
                    )
            continue
        if tensor > 1:
            yield SpecFault(
                ("regions", number, "mesh", "tensor"),
                f"is {tensor}, but a model of kind {kind} does not say how to cut its tensors",
                "Use data and fsdp instead.",
                (("model", "kind"),),
            )
        inner, usual = spec.inner_of(region.name), InnerSpec()
        for key in ("compute", "remat", "loss_chunks", "attention"):
            if (asked := getattr(inner, key)) != getattr(usual, key):
                own = key in (region.inner or {})
                yield SpecFault(
                    ("regions", number, "inner", key) if own else ("inner", key),
                    f"is {asked}, but a model of kind {kind} computes its loss in one way only",
                    f"Remove {key}.",
                    (("model", "kind"),),
                )


def spelled_out(spec: RunSpec) -> RunSpec:
    """Gives the same run with every option of every kind written down."""
    load_plugins(spec)
    data = resolved(spec)
    for path, registry, choice in _choices(spec):
        at: Any = data
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = {"kind": choice["kind"], **_options(registry.build(choice))}
    return RunSpec.model_validate(data)


def _options(built: Any) -> Choice:
    fields = [field for field in dataclasses.fields(cast(Any, built)) if field.init]
    values = {field.name: getattr(built, field.name) for field in fields}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


def shared_settings(spec: RunSpec) -> Settings:
    """Gives what every process of the run must have in common, as plain data."""
    everything = resolved(spelled_out(spec))
    # How much of its line a region may use is between the region and its line.
    everything["wire"].pop("rate_limit", None)
    # Nor does it matter where a host keeps what it reads: only what it says does.
    if everything["model"]["kind"] == "hf":
        everything["model"].pop("folder", None)
    built = {path: choices.build(choice) for path, choices, choice in _data_choices(spec)}
    tokenizer = next(filter(None, _tokenizer_digests(built).values()), None)
    named = {"tokenizer": tokenizer} if tokenizer not in (None, "bytes") else {}
    return {**{key: everything[key] for key in SHARED}, **named}


def shared_digest(spec: RunSpec) -> str:
    """The digest of the shared settings: equal digests mean runs that can be merged."""
    return settings_digest(shared_settings(spec))
