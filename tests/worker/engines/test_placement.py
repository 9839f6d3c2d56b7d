"""Where weights lie on one device changes nothing about what enters and leaves it."""

import jax
import numpy as np
import pytest

from diloco_cli.core.fragments import cut, gather
from diloco_cli.errors import StoreError
from diloco_cli.models.decoder import Decoder
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.jax_engine import inner_optimizer, make_step, use_compile_cache
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.placement import place_model

use_compile_cache()

MODEL = Decoder(layers=3, width=16, heads=2, kv_heads=1, ffn=32, vocabulary=64)
LAYOUT = cut(MODEL.tensors(), 6)
TOKENS = (np.arange(4 * 17).reshape(4, 17) * 7 % 64).astype(np.int32)
STACKED = place_model(MODEL, stacked=True)


def step_of(**form):
    inner = InnerSpec(batch=4, sequence=16, **form)
    return make_step(MODEL, inner, RatePlan.of(inner, 50))


@pytest.fixture(scope="module")
def plain():
    return step_of()


@pytest.fixture(scope="module")
def scanned():
    return step_of(remat="block", loss_chunks=4)


def test_stacks_hold_every_tensor_once_under_its_own_name():
    weights = MODEL.init(0)
    params = STACKED.place(weights)
    assert params["blocks.ffn.gate"].shape == (3, 16, 32) and len(params) == 13
    for name, values in STACKED.fetch(params).items():
        np.testing.assert_array_equal(values, weights[name])


def test_fragments_are_read_from_stacks_as_the_core_would_cut_them():
    weights = MODEL.init(0)
    params = STACKED.place(weights)
    for fragment in LAYOUT.fragments:
        np.testing.assert_array_equal(STACKED.read(params, fragment), gather(weights, fragment))


def test_fragments_are_written_into_stacks_and_nothing_else_is():
    params, others = STACKED.place(MODEL.init(0)), MODEL.init(1)
    for number, fragment in enumerate(LAYOUT.fragments):
        params = STACKED.write(params, fragment, gather(others, fragment))
        for later in LAYOUT.fragments:
            wanted = others if later.number <= number else MODEL.init(0)
            np.testing.assert_array_equal(STACKED.read(params, later), gather(wanted, later))


def test_a_scanned_region_trains_as_an_unrolled_one(plain, scanned):
    engines = [plain.engine(), scanned.engine()]
    for engine in engines:
        engine.load(MODEL.init(0), None)
    losses = [[float(engine.step(TOKENS)) for _ in range(5)] for engine in engines]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    ours, theirs = (engine.snapshot() for engine in engines)
    for name, values in ours.params.items():
        # Where a gradient is all rounding, Adam makes a step of its sign.
        close = np.isclose(values, theirs.params[name], atol=1e-4)
        assert close.mean() > 0.99, name
    assert ours.optimizer.keys() == theirs.optimizer.keys()


def test_a_region_may_change_its_form_at_a_restart(plain, scanned):
    first = plain.engine()
    first.load(MODEL.init(0), None)
    first.step(TOKENS)
    saved = first.snapshot()
    second = scanned.engine()
    second.load(saved.params, saved.optimizer)
    again = second.snapshot()
    for ours, theirs in ((again.params, saved.params), (again.optimizer, saved.optimizer)):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values)
    assert float(second.step(TOKENS)) == pytest.approx(float(first.step(TOKENS)), abs=1e-5)


def test_norms_in_a_stack_do_not_decay_either():
    """A stack of norms has two axes, as matrices have."""
    options = {"kind": "adamw", "lr": 0.1, "decay": 0.5}
    asked = InnerSpec(optimizer=options, schedule={"kind": "constant"})
    transform, params = (
        inner_optimizer(STACKED, asked, RatePlan.of(asked, 10)),
        STACKED.place(MODEL.init(0)),
    )
    nothing = {name: values * 0 for name, values in params.items()}
    moved, _ = jax.jit(transform.update)(nothing, transform.init(params), params)
    for name, values in moved.items():
        decay = 0.0 if name.endswith("norm") else 0.05
        np.testing.assert_allclose(values, -decay * params[name], rtol=1e-5)


def test_a_state_with_a_layer_too_many_is_refused(scanned):
    engine = scanned.engine()
    engine.load(MODEL.init(0), None)
    saved = engine.snapshot()
    odd = {name.replace(".02.", ".03."): values for name, values in saved.optimizer.items()}
    assert not engine.load(saved.params, odd)
    with pytest.raises(StoreError, match=r"differs in .*blocks\.02"):
        scanned.restore_state(odd)
