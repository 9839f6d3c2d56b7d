"""A trainer that stops and starts again ends with the same bits as one that never stopped."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from diloco_cli.core.fragments import cut, gather
from diloco_cli.core.lanes import Cursor, LanePosition
from diloco_cli.errors import StoreError
from diloco_cli.models.decoder import Decoder
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.jax_engine import JaxStep, make_step, use_compile_cache
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.placement import place_model
from diloco_cli.worker.trainer.checkpoints.checkpoint import Checkpoint, load, save

use_compile_cache()

MODEL = Decoder(layers=1, width=16, heads=2, kv_heads=1, ffn=32, vocabulary=64)
PLACEMENT = place_model(MODEL)
LAYOUT = cut(MODEL.tensors(), 6)
INNER = InnerSpec(batch=4, sequence=16, schedule={"kind": "cosine", "warmup": 3})


def tokens(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 64, (4, 17), dtype=np.int32)


def a_checkpoint(**changes) -> Checkpoint:
    plain = {
        "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "opt_state": {"[0].count": np.array(4, np.int32), "[0].mu['w']": np.ones((2, 3))},
        "anchors": [np.full(number + 1, number, np.float32) for number in range(12)],
        "books": [{"version": 3, "held": {"tokens": 0.1 + 0.2, "steps": 2}, "flight": None}],
        "cursor": Cursor("order", 64, {3: LanePosition(7, 96)}, {5: LanePosition(2, 90)}),
        "clock": 41,
        "step": 40,
        "meta": {"run": "7f", "layout": "ab"},
    }
    return Checkpoint(**{**plain, **changes})


@pytest.fixture(scope="module")
def step() -> JaxStep:
    return make_step(MODEL, INNER, RatePlan.of(INNER, 100))


def train(step: JaxStep, params, state, numbers):
    for number in numbers:
        params, state, _, _ = step.step(params, state, tokens(number))
    return params, state


def test_three_steps_a_restart_and_three_more_are_six_steps(step, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    start = PLACEMENT.place(MODEL.init(0))
    straight, end = train(step, start, step.init_state(start), range(6))

    params = PLACEMENT.place(MODEL.init(0))
    params, state = train(step, params, step.init_state(params), range(3))
    anchors = [gather(MODEL.init(0), fragment) for fragment in LAYOUT.fragments]
    save(
        path,
        a_checkpoint(
            params=PLACEMENT.fetch(params), opt_state=PLACEMENT.flatten(state), anchors=anchors
        ),
    )
    del params, state

    saved = load(path)
    params = PLACEMENT.place(saved.params)
    params, state = train(step, params, step.restore_state(saved.opt_state), range(3, 6))
    for name, values in PLACEMENT.fetch(straight).items():
        np.testing.assert_array_equal(np.asarray(params[name]), values)
    for name, values in PLACEMENT.flatten(end).items():
        np.testing.assert_array_equal(PLACEMENT.flatten(state)[name], values)


def test_everything_comes_back_as_it_was(tmp_path):
    path, written = tmp_path / "checkpoint.safetensors", a_checkpoint()
    save(path, written)
    read = load(path)
    for name in ("books", "cursor", "clock", "step", "meta"):
        assert getattr(read, name) == getattr(written, name)
    for name in ("params", "opt_state"):
        ours, theirs = getattr(read, name), getattr(written, name)
        assert list(map(_kind, ours.values())) == list(map(_kind, theirs.values()))
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    assert [anchor.size for anchor in read.anchors] == list(range(1, 13))


def _kind(values: np.ndarray) -> tuple:
    return values.shape, values.dtype


def test_a_save_that_is_interrupted_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    save(path, a_checkpoint(step=1))

    def power_cut(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError, match="power cut"):
        save(path, a_checkpoint(step=2))
    assert load(path).step == 1


def test_content_is_on_disk_before_the_name_and_the_name_before_we_go_on(tmp_path, monkeypatch):
    done = []
    flush, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("flush"), flush(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), rename(*names)))
    save(tmp_path / "checkpoint.safetensors", a_checkpoint())
    assert done == ["flush", "rename", "flush"]


@pytest.mark.parametrize("left", [0, 5, 100, 700, -1])
def test_a_torn_file_is_named_with_a_way_out(tmp_path, left):
    path = tmp_path / "checkpoint.safetensors"
    save(path, a_checkpoint())
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StoreError) as caught:
        load(path)
    assert str(path) in caught.value.message and "published weights" in (caught.value.hint or "")


def test_a_changed_bit_is_noticed_and_its_array_named(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save(path, a_checkpoint())
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(5).tobytes(), 2000)] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged: (params/w|anchor/)"):
        load(path)


def test_a_file_of_another_version_or_make_is_refused(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_file({}, path, metadata={"diloco": json.dumps({"version": 2})})
    with pytest.raises(StoreError, match="has version 2, this program reads version 1"):
        load(path)
    save_file({"w": np.zeros(3)}, path)
    with pytest.raises(StoreError, match="cannot be read"):
        load(path)


def test_no_file_is_an_error_of_its_own(tmp_path):
    with pytest.raises(StoreError, match="There is no checkpoint"):
        load(tmp_path / "checkpoint.safetensors")


def test_the_state_of_another_optimizer_is_refused(step):
    params = PLACEMENT.place(MODEL.init(0))
    sgd = INNER.model_copy(update={"optimizer": {"kind": "sgd"}})
    other = make_step(MODEL, sgd, RatePlan.of(sgd, 100))
    with pytest.raises(StoreError, match="does not fit the optimiser of this run"):
        step.restore_state(PLACEMENT.flatten(other.init_state(params)))
