"""What loss does a way to synchronise reach at equal tokens?

A cell is one way and one seed. Every cell of a table trains the same model on as many
tokens of the same text, with the same number of sequences in a step of all regions
together, and is measured on the same held-out text: the global weights, after the end.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from diloco_cli.assemble import spelled_out
from diloco_cli.bench.quality.cells import Cell
from diloco_cli.bench.quality.learner import TrainingOptions
from diloco_cli.bench.quality.setting import BATCH, RATE, SEQUENCE
from diloco_cli.bench.quality.training import CurvePoint, Trained, Training, Watch
from diloco_cli.core.fragments import cut
from diloco_cli.data import Stream, datasets
from diloco_cli.errors import RunFailed
from diloco_cli.merge.optimizers import averaged
from diloco_cli.models import Model, models, parameters
from diloco_cli.sim import faults
from diloco_cli.sim.network import Link
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario, ServerSite
from diloco_cli.spec.fault_kinds import KILLS
from diloco_cli.spec.load import check_spec
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.schema import InnerSpec, RunSpec
from diloco_cli.worker.engines.jax_engine import JaxStep, make_step
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.placement import place_model
from diloco_cli.worker.trainer.task import Task, horizon

STEP = 1.0
"""Virtual seconds of an inner step at full speed; only ratios matter."""
REAL_STEP = 0.25
"""Seconds of such a step where kills are counted by the hour."""
BACK_AGAIN = 20
"""Steps that a killed trainer misses: 5 s."""
LEASE = 40
"""Steps of silence after which a region that is away counts no longer as live: 10 s."""
GRADIENT_BITS = 16
"""A parameter, of what data parallel sends and receives in each step: bf16, both ways at once."""
LONGEST = 10
"""Of an undisturbed run's time, how long things may go on happening."""
CHECKPOINT = 8
"""Steps between two checkpoints of a trainer: 2 s, as one of a small model has them."""


AVERAGE = 0.05
"""Share of the rounds over which published weights are averaged, and those of data parallel."""

AVERAGE_STEPS = 24
"""Of data parallel, from one entry of its average to the next: as often as a fragment travels."""

RULES = 5
"""Version of what a cell is besides its settings: how often regions report, how a run ends, and
the like. Cells of other rules are run again. 2: a fragment that has enough is called at once.
3: work of many steps is shortened, and learning rates follow the run's tokens. 4: a round with few
members takes a step in proportion. 5: the grace window covers how far answers are from their
average."""

DECISIVE = (
    *("seed", "budget", "model", "data", "inner", "regions"),
    *("sync", "merge", "outer", "wire"),
)
"""Sections of the spec that a cell's weights follow from."""


@dataclass(frozen=True)
class Budget:
    """What all cells of a table have in common."""

    tokens: int = 6_291_456
    batch: int = BATCH
    """Sequences in a step of all regions together."""
    sequence: int = SEQUENCE
    layers: int = 1
    width: int = 32
    heads: int = 1
    warmup: int = 50
    lr: float = RATE
    """Inner, of data parallel."""
    lr_regions: float = 0.0
    """Inner, of cells with regions; 0: the same."""
    windows: int = 4096
    """Held-out sequences that a result is measured on."""

    @property
    def steps(self) -> int:
        return self.tokens // (self.batch * self.sequence)

    @property
    def model(self) -> dict[str, Any]:
        shape = {"layers": self.layers, "width": self.width, "heads": self.heads}
        return {"kind": "decoder", **shape}

    def per_parameter(self, tokens: float) -> Budget:
        """The same with about so many tokens for each parameter of the model."""
        size = parameters(models.build(self.model))
        steps = round(tokens * size / (self.batch * self.sequence))
        return replace(self, tokens=max(1, steps) * self.batch * self.sequence)


def spec_of(cell: Cell, budget: Budget, seed: int) -> RunSpec:
    """The cell as a run spec; what neither cell nor budget says is the spec's own default."""
    count = max(1, cell.regions)
    speeds = (cell.told and cell.speeds) or (1.0,) * count
    data: dict[str, Any] = {
        "spec": 1,
        "name": "quality",
        "seed": seed,
        "budget": {"tokens": budget.tokens},
        "model": budget.model,
        "data": {"kind": "python-source"},
        "inner": {
            "batch": budget.batch // count,
            "sequence": budget.sequence,
            "optimizer": {
                "kind": "adamw",
                "lr": (budget.lr_regions if cell.regions else 0.0) or budget.lr,
            },
            "schedule": {"kind": "cosine", "warmup": budget.warmup, "floor": 0.1},
        },
        "regions": [{"name": f"r{n}", "speed": speed} for n, speed in enumerate(speeds)],
        "outer": {"kind": "nesterov", "ema": AVERAGE},
    }
    if not cell.regions:
        data["sync"] = {"fragments": 1, "every": 3}  # It has none; the spec wants one that fits.
    for key, value in cell.settings:
        _put(data, key.split("."), value)
    return check_spec(data, f"The cell {cell.name!r}")


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    for step in path[:-1]:
        data = data.setdefault(step, {})
    data[path[-1]] = value


def name_of(cell: Cell, budget: Budget, seed: int) -> str:
    """Names all that a cell's result follows from."""
    everything = resolved(spelled_out(spec_of(cell, budget, seed)))
    spec = {key: everything[key] for key in DECISIVE}
    world = [cell.regions, cell.speeds, cell.jitter, cell.travel, cell.kills, cell.lockstep]
    world += [cell.absence, LEASE] if cell.absence else []
    world += [cell.struck] if cell.struck != "cut" else []
    world += [["slower", cell.slower]] if cell.slower else []
    world += [["turns", cell.turns, LEASE]] if cell.turns else []
    world += ["untold"] if not cell.told else []
    rules = [RULES, REAL_STEP, BACK_AGAIN, CHECKPOINT, text_digest(json.dumps(spec["data"]))]
    text = json.dumps([spec, world, budget.windows, rules], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CellRecord = dict[str, Any]
"""One line of the file: which cell and seed, and `loss` with all figures, or why it `failed`.

Only records of equal `settings` are comparable; of equal `cell` and `way` they differ by their
seeds alone.
"""


def about(cell: Cell, budget: Budget, seed: int) -> CellRecord:
    """How a record begins: what was trained, and what makes it comparable with others."""
    spec = spec_of(cell, budget, seed)
    return {
        "cell": cell.name,
        "seed": seed,
        "id": name_of(cell, budget, seed),
        "way": name_of(cell, budget, 0),
        "against": cell.against,
        "lr": spec.inner.optimizer.get("lr"),
        "settings": {
            "model": budget.model,
            **{key: getattr(budget, key) for key in ("batch", "sequence", "tokens", "warmup")},
            "windows": budget.windows,
            "text": text_digest(json.dumps(spec.data)),
            "rules": RULES,
        },
    }


Keep = Callable[[Trained], None]


def run_cell(
    cell: Cell, budget: Budget, seed: int, keep: Keep | None = None, *, every: float = 0.0
) -> CellRecord:
    """Trains and measures one cell; gives the record of it, and the weights to `keep`.

    With `every` the record has a curve: virtual seconds, tokens and loss, measured so often.
    """
    began, cpu = time.monotonic(), time.process_time()
    record, spec = about(cell, budget, seed), spec_of(cell, budget, seed)
    parts = heldout_of(spec, budget.windows)
    watch = Watch(every, lambda weights: evaluate(spec, weights, parts[0])) if every else None
    try:
        trained, curve = _decoupled(cell, spec, watch) if cell.regions else _parallel(spec, watch)
    except RunFailed as error:
        return {**record, "failed": error.message}
    if keep is not None:
        keep(trained)
    halves = [evaluate(spec, trained.weights, part) for part in parts]
    averages = [evaluate(spec, trained.average, part) for part in parts]
    kept = {key: value for key, value in vars(trained).items() if key not in ("weights", "average")}
    figures = {key: _short(value) for key, value in kept.items()}
    return {
        **record,
        "loss": round(sum(halves) / 2, 6),
        "halves": [round(half, 6) for half in halves],
        "ema": round(sum(averages) / 2, 6),
        "tokens": budget.tokens,
        **figures,
        **({"curve": [[round(number, 5) for number in point] for point in curve]} if curve else {}),
        "wall": round(time.monotonic() - began, 1),
        "cpu": round(time.process_time() - cpu, 1),
    }


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _parallel(spec: RunSpec, watch: Watch | None) -> tuple[Trained, list[CurvePoint]]:
    """Plain training with the whole batch: what data parallel computes."""
    task = task_of(spec, "r0", 0, 1)
    engine, cursor = task.step.engine(), task.stream.start()
    engine.load(task.model.init(spec.seed), None)
    average: dict[str, np.ndarray] = {}
    curve: list[CurvePoint] = []
    for step in range(1, horizon(spec) + 1):
        tokens, cursor = task.stream.batch(cursor)
        engine.step(tokens)
        if step % AVERAGE_STEPS == 0:
            for name, values in engine.snapshot().params.items():
                flat, before = values.ravel(), average.get(name)
                at = step // AVERAGE_STEPS
                average[name] = averaged(before, flat, at, share=AVERAGE)
        if watch is not None and step * STEP // watch.every > (step - 1) * STEP // watch.every:
            loss = watch.measure(engine.snapshot().params)
            curve.append(CurvePoint(step * STEP, float(step * task.tokens), loss))
    weights = engine.snapshot().params
    average = {name: average.get(name, flat).reshape(flat.shape) for name, flat in weights.items()}
    plain = (spec.budget.tokens, 1.0, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    return Trained(weights, average, *plain), curve


def _decoupled(cell: Cell, spec: RunSpec, watch: Watch | None) -> tuple[Trained, list[CurvePoint]]:
    count = len(spec.regions)
    tasks = {
        region.name: task_of(spec, region.name, number, count)
        for number, region in enumerate(spec.regions)
    }
    dies = bool(cell.kills) or (cell.absence is not None and cell.struck in KILLS)
    habits = TrainingOptions(cell.lockstep, CHECKPOINT if dies else None)
    scenario = scenario_of(cell, spec, tasks)
    training = Training(spec, scenario, tasks, habits=habits, refund=bool(cell.kills), watch=watch)
    return training.train(), training.curve


def scenario_of(cell: Cell, spec: RunSpec, tasks: Mapping[str, Task]) -> Scenario:
    """The cell as time sees it."""
    # A frame, the news of a version and the version each take one delay.
    link = Link(delay=cell.travel * STEP / 3)
    layout = tasks[spec.regions[0].name].layout
    if cell.slower:
        size = sum(fragment.size for fragment in layout.fragments)
        link = replace(link, rate=GRADIENT_BITS * size / (cell.slower * STEP))
    sites = tuple(
        RegionSite(region.name, STEP / speed, float(tasks[region.name].tokens), link, cell.jitter)
        for region, speed in zip(
            spec.regions, cell.speeds or (1.0,) * len(spec.regions), strict=True
        )
    )
    struck: list[faults.Fault] = []
    if cell.kills:
        mean = 3600 / cell.kills * len(sites) / REAL_STEP * STEP
        names = [site.name for site in sites]
        until = LONGEST * STEP * horizon(spec)
        struck = faults.drawn(faults.Law(mean), names, until=until, seed=spec.seed)
    if cell.absence:
        first, last = (share * STEP * horizon(spec) for share in cell.absence)
        struck.append(faults.Fault(first, cell.struck, sites[-1].name, last - first))
    if cell.turns:
        pair = [site.name for site in sites[-2:]]
        length = cell.turns * STEP * horizon(spec)
        turns = math.ceil(LONGEST / cell.turns)
        struck += [faults.Fault(n * length, "leave", pair[n % 2], length) for n in range(turns)]
    return Scenario(
        name=cell.name,
        sites=sites,
        sizes=tuple(fragment.size for fragment in layout.fragments),
        sync=spec.sync,
        duration=float("inf"),
        server=ServerSite(
            lease=(LEASE if cell.absence or cell.turns else 1000) * STEP, commit=0.005 * STEP
        ),
        recovery=Recovery(detect=0.0, restart=BACK_AGAIN * STEP),
        faults=tuple(struck),
        seed=spec.seed,
    )


# Everything that costs time to make is made once


def task_of(spec: RunSpec, region: str, index: int, count: int) -> Task:
    """What a region has to do; regions and cells that step alike share the compiled step."""
    inner, model = spec.inner_of(region), models.build(spec.model)
    text = _text(json.dumps(spec.data), inner.sequence)
    stream = replace(text, order=replace(text.order, seed=spec.seed), batch_size=inner.batch)
    rate = RatePlan.of(inner, horizon(spec), spec.budget.tokens)
    return Task(
        spec=spec,
        region=region,
        model=model,
        tensors=model.tensors(),
        layout=cut(model.tensors(), spec.sync.fragments),
        inner=inner,
        rate=rate,
        step=_step(model, inner.model_dump_json(), rate.horizon, rate.budget),
        stream=stream.part(index, count),
    )


@functools.lru_cache(maxsize=24)
def _step(model: Model, settings: str, horizon: int, budget: float) -> JaxStep:
    inner = InnerSpec.model_validate_json(settings)
    return make_step(model, inner, RatePlan.of(inner, horizon, budget))


@functools.cache
def _text(data: str, sequence: int) -> Stream:
    return datasets.build(json.loads(data)).open(0, 1, sequence)


@functools.cache
def text_digest(data: str) -> str:
    """Names the text by its beginning and its length: Python's own library differs by version."""
    text = _text(data, 32)
    sample = replace(text, batch_size=64).heldout(4)
    words = hashlib.sha256(f"{text.training.size} {text.apart.size}".encode())
    for batch in sample:
        words.update(np.ascontiguousarray(batch).tobytes())
    return words.hexdigest()[:16]


@functools.cache
def _loss(model: Model) -> Any:
    return jax.jit(model.loss_fn(penalties=False))


def heldout_of(spec: RunSpec, windows: int) -> list[list[np.ndarray]]:
    """Two halves of the held-out text, so that a result says how far the text decides it."""
    text = _text(json.dumps(spec.data), spec.inner.sequence)
    batches = replace(text, batch_size=64).heldout(windows // 64)
    return [batches[0::2], batches[1::2]]


def evaluate(spec: RunSpec, weights: dict[str, np.ndarray], batches: list[np.ndarray]) -> float:
    """Measures the mean loss of weights on held-out text, in nats per token."""
    model = models.build(spec.model)
    loss, params = _loss(model), place_model(model).place(weights)
    return float(np.mean([float(loss(params, tokens)[0]) for tokens in batches]))
