"""An inner step moves all weights at once; what it is given is gone, what it gives is ours."""

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from diloco_cli.core.fragments import cut, gather
from diloco_cli.errors import SpecError
from diloco_cli.models.decoder import Decoder
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.jax_engine import (
    JaxStep,
    inner_optimizer,
    make_step,
    use_compile_cache,
)
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.optimizers import optimizers, schedules
from diloco_cli.worker.engines.placement import place_model
from diloco_cli.worker.trainer.task import limit_cores

use_compile_cache()

MODEL = Decoder(layers=1, width=16, heads=2, kv_heads=1, ffn=32, vocabulary=64)
TOKENS = (np.arange(4 * 17).reshape(4, 17) * 7 % 64).astype(np.int32)
PLACEMENT = place_model(MODEL)
LAYOUT = cut(MODEL.tensors(), 6)


def inner(**options) -> InnerSpec:
    return InnerSpec(**{"batch": 4, "sequence": 16, "schedule": {"kind": "constant"}, **options})


def step_of(horizon: int, **options) -> JaxStep:
    chosen = inner(**options)
    return make_step(MODEL, chosen, RatePlan.of(chosen, horizon))


def one_step(step: JaxStep, tokens: np.ndarray = TOKENS) -> tuple[dict[str, np.ndarray], float]:
    params = PLACEMENT.place(MODEL.init(0))
    params, _, loss, _ = step.step(params, step.init_state(params), tokens)
    return PLACEMENT.fetch(params), float(loss)


@pytest.fixture(scope="module")
def adamw() -> JaxStep:
    return step_of(100, schedule={"kind": "cosine", "warmup": 3})


def test_the_loss_falls(adamw):
    params = PLACEMENT.place(MODEL.init(0))
    state = adamw.init_state(params)
    losses = []
    for _ in range(30):
        params, state, loss, _ = adamw.step(params, state, TOKENS)
        losses.append(float(loss))
    assert losses[0] > 4 and losses[-1] < losses[0] / 2
    assert adamw.evaluate(params, [TOKENS]) < losses[-1]


def test_a_step_says_its_rate_and_the_norm_of_its_gradient(adamw):
    params = PLACEMENT.place(MODEL.init(0))
    _, slope = adamw.gradient(params, TOKENS)
    norm = np.sqrt(sum(float((np.asarray(values) ** 2).sum()) for values in slope.values()))
    engine = adamw.engine()
    engine.load(MODEL.init(0), None)
    assert engine.facts() is None
    rates = rates_of({"kind": "cosine", "warmup": 3}, RatePlan.of(inner(), 100).lr, horizon=100)
    for place in range(4):
        engine.step(TOKENS)
        if place == 0:
            assert engine.facts() is None, "the last step may not be done"
        elif place == 1:
            assert engine.facts() == pytest.approx((rates[0], norm), rel=1e-4)
        else:
            assert engine.facts().learning_rate == pytest.approx(rates[place - 1])


def test_the_same_start_gives_the_same_bits(adamw):
    first, second = one_step(adamw), one_step(adamw)
    assert first[1] == second[1]
    for name, values in first[0].items():
        np.testing.assert_array_equal(values, second[0][name])


def test_micro_batches_add_up_to_the_whole_batch():
    slow = {"kind": "sgd", "lr": 0.5, "momentum": 0}
    whole, parts = (one_step(step_of(10, optimizer=slow, accumulate=count)) for count in (1, 4))
    assert parts[1] == pytest.approx(whole[1], rel=1e-6)
    for name, values in whole[0].items():
        np.testing.assert_allclose(parts[0][name], values, atol=2e-6)


def test_a_batch_that_does_not_part_is_refused():
    with pytest.raises(SpecError, match="batch is 4, which does not part into 3"):
        step_of(10, accumulate=3)


def updates(slope: float, **options) -> dict[str, np.ndarray]:
    """Gives the first move of the inner optimiser when every gradient is `slope`."""
    weights = MODEL.init(0)
    chosen = inner(**options)
    transform = inner_optimizer(PLACEMENT, chosen, RatePlan.of(chosen, 10))
    gradient = {name: np.full_like(values, slope) for name, values in weights.items()}
    moved, _ = jax.jit(transform.update)(gradient, transform.init(weights), weights)
    return {name: np.asarray(values) for name, values in moved.items()}


def test_the_gradient_is_clipped_to_its_norm():
    plain = {"kind": "sgd", "lr": 0.5, "momentum": 0}
    moved = updates(3.0, optimizer=plain, clip=0.01)
    length = np.sqrt(sum((values**2).sum() for values in moved.values()))
    assert length == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_matrices_decay_and_norms_do_not():
    moved = updates(0.0, optimizer={"kind": "adamw", "lr": 0.1, "decay": 0.5})
    for name, weights in MODEL.init(0).items():
        decay = 0.05 if weights.ndim > 1 else 0.0
        np.testing.assert_allclose(moved[name], -decay * weights, rtol=1e-5)


def test_muon_moves_hidden_matrices_by_orthogonal_steps_and_the_rest_by_adam():
    """All singular values of a hidden matrix's update are about the same; it also decays."""
    rng = np.random.default_rng(3)
    gradient = {n: rng.normal(size=v.shape).astype(np.float32) for n, v in MODEL.init(0).items()}
    lr = 0.01

    def moved(kind: str, **more) -> dict[str, np.ndarray]:
        chosen = inner(optimizer={"kind": kind, "lr": lr, "decay": 0.0, **more}, clip=1e9)
        transform = inner_optimizer(PLACEMENT, chosen, RatePlan.of(chosen, 10))
        found: Any = transform.update(gradient, transform.init(MODEL.init(0)), MODEL.init(0))[0]
        return {name: np.asarray(values) for name, values in found.items()}

    muon, adamw = moved("muon"), moved("adamw")
    hidden = {t.name for t in MODEL.tensors() if len(t.shape) == 2 and not t.embedding}
    assert hidden and len(hidden) < len(muon)
    for name, update in muon.items():
        if name in hidden:
            values = np.linalg.svd(update, compute_uv=False)
            assert values.min() > 0.4 * values.max()
            assert np.sqrt(np.mean(update**2)) == pytest.approx(0.2 * lr, rel=0.35)
        else:
            # Adam's first step goes by the sign alone; this one looks ahead, so it is longer.
            assert (np.sign(update) == np.sign(adamw[name])).all() and np.ptp(np.abs(update)) < 1e-4
    decayed = moved("muon", decay=0.5)
    for name, weights in MODEL.init(0).items():
        share = 0.5 * lr if name in hidden else 0.0
        np.testing.assert_allclose(decayed[name], muon[name] - share * weights, atol=2e-6)


def test_a_step_that_is_not_finite_moves_nothing_and_says_so(adamw):
    poisoned = MODEL.init(0)
    poisoned["norm"][3] = np.inf
    params = PLACEMENT.place(poisoned)
    state = adamw.init_state(params)
    before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
    params, state, loss, _ = adamw.step(params, state, TOKENS)
    assert np.isnan(float(loss))
    for name, values in poisoned.items():
        np.testing.assert_array_equal(np.asarray(params[name]), values)
    for old, new in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(new), old)


def test_what_a_step_is_given_is_gone(adamw):
    params = PLACEMENT.place(MODEL.init(0))
    adamw.step(params, adamw.init_state(params), TOKENS)
    assert all(values.is_deleted() for values in params.values())


def shareable(values: np.ndarray) -> np.ndarray:
    """Copies to an address JAX would use as it is: a multiple of 64."""
    room = np.empty(values.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    aligned = room[begin : begin + values.nbytes].view(np.float32).reshape(values.shape)
    aligned[...] = values
    return aligned


def test_placed_weights_do_not_follow_the_array_they_came_from():
    weights = {**MODEL.init(0), "embed": shareable(MODEL.init(0)["embed"])}
    params = PLACEMENT.place(weights)
    weights["embed"][:] = 7.0
    assert float(params["embed"].max()) < 7.0


def test_evaluation_weighs_batches_by_their_tokens(adamw):
    weights = MODEL.init(0)
    short, long = TOKENS[:1], TOKENS[1:]
    apart = [adamw.evaluate(PLACEMENT.place(weights), [part]) for part in (short, long)]
    both = adamw.evaluate(PLACEMENT.place(weights), [short, long])
    assert both == pytest.approx((apart[0] + 3 * apart[1]) / 4, rel=1e-6)


def test_a_fragment_leaves_the_device_as_the_core_would_cut_it():
    weights = MODEL.init(0)
    params = PLACEMENT.place(weights)
    split = [piece for part in LAYOUT.fragments for piece in part.pieces if piece.start]
    assert split, "the layout must contain a tensor in several pieces"
    for fragment in LAYOUT.fragments:
        np.testing.assert_array_equal(PLACEMENT.read(params, fragment), gather(weights, fragment))


def test_a_fragment_taken_out_stays_as_it_was_while_training_goes_on(adamw):
    params = PLACEMENT.place(MODEL.init(0))
    state = adamw.init_state(params)
    vectors = [PLACEMENT.read(params, fragment) for fragment in LAYOUT.fragments]
    copies = PLACEMENT.fetch(params)
    for _ in range(3):
        params, state, _, _ = adamw.step(params, state, TOKENS)
    weights = MODEL.init(0)
    for fragment, vector in zip(LAYOUT.fragments, vectors, strict=True):
        np.testing.assert_array_equal(vector, gather(weights, fragment))
    for name, values in copies.items():
        np.testing.assert_array_equal(values, weights[name])


def test_a_replaced_fragment_is_ours_alone_and_leaves_the_rest(adamw):
    params = PLACEMENT.place(MODEL.init(0))
    state = adamw.init_state(params)
    params, state, _, _ = adamw.step(params, state, TOKENS)
    fragment, *others = LAYOUT.fragments
    rest = [PLACEMENT.read(params, other) for other in others]
    vector = shareable(np.linspace(-1, 1, fragment.size, dtype=np.float32))
    original = vector.copy()
    params = PLACEMENT.write(params, fragment, vector)
    vector[:] = 7.0
    np.testing.assert_array_equal(PLACEMENT.read(params, fragment), original)
    for other, values in zip(others, rest, strict=True):
        np.testing.assert_array_equal(PLACEMENT.read(params, other), values)
    adamw.step(params, state, TOKENS)
    assert (vector == 7.0).all()


def test_a_step_is_compiled_once_whatever_happens_between_steps():
    step = step_of(100, schedule={"kind": "cosine", "warmup": 3})
    engine = step.engine()
    engine.load(MODEL.init(0), None)
    engine.step(TOKENS)
    for number, fragment in enumerate(LAYOUT.fragments):
        engine.place(10 * (number + 1))
        engine.step(TOKENS)
        engine.write(fragment, engine.read(fragment))
        engine.step(TOKENS)
    compiled: Any = step.step
    assert compiled._cache_size() == 1


def rates_of(asked: dict, peak: float, *, horizon: int) -> list[float]:
    schedule = schedules.build(asked).build(peak, horizon)
    return [float(np.asarray(schedule(step))) for step in range(horizon + 50)]


def test_cosine_rises_falls_to_its_floor_and_stays():
    rates = rates_of({"kind": "cosine", "warmup": 10, "floor": 0.1}, 2.0, horizon=100)
    assert 0 < rates[0] < rates[5] < rates[9] < rates[10] == 2.0
    assert rates[10:101] == sorted(rates[10:101], reverse=True)
    assert rates[55] == pytest.approx(1.1, rel=1e-3)
    assert rates[100] == rates[149] == pytest.approx(0.2, rel=1e-5)


def test_a_short_run_warms_up_for_a_quarter_of_it():
    rates = rates_of({"kind": "constant", "warmup": 1000}, 1.0, horizon=20)
    assert rates[4] < 1.0 == rates[5] == rates[19]


@pytest.mark.parametrize("kind", optimizers.kinds())
def test_every_optimizer_has_a_learning_rate_and_can_be_built(kind):
    chosen = optimizers.build({"kind": kind, "lr": 0.25})
    rate = schedules.build({"kind": "constant"}).build(chosen.lr, 10)
    weights = {"matrix": np.ones((2, 2), np.float32)}
    transform = chosen.build(rate, {"matrix": True})
    moved, _ = transform.update(weights, transform.init(weights), weights)
    assert all((np.asarray(leaf) < 0).all() for leaf in jax.tree.leaves(moved))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert use_compile_cache(tmp_path / "file" / "compile") is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_cores_are_limited_to_those_that_exist():
    before = os.sched_getaffinity(0)
    try:
        limit_cores([min(before), 9999])
        assert os.sched_getaffinity(0) == {min(before)}
        limit_cores([9999])
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


REUSE = """
import resource, sys, threading
import numpy as np
from diloco_cli.system.malloc import keep_memory
print(int(keep_memory()))
def churn():
    for _ in range(20):
        np.ones(32 << 20, np.uint8)
thread = threading.Thread(target=churn)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread.start(); thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_used_again_without_asking_the_kernel():
    done = subprocess.check_output([sys.executable, "-c", REUSE], text=True)
    understood, faults = map(int, done.split())
    if not understood:
        pytest.skip("this C library has no mallopt")
    # Twenty times 32 MiB is 164,000 pages; once is 8,192.
    assert faults < 30_000
