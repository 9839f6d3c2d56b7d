"""A model is its tensors and its arithmetic; the server needs only the first."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

from diloco_cli.errors import RegistryError
from diloco_cli.models import decoder_flax, models, parameters
from diloco_cli.models.decoder import Decoder
from diloco_cli.worker.engines.jax_engine import use_compile_cache

use_compile_cache()

SMALL = Decoder(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocabulary=50)


TOKENS = np.random.default_rng(1).integers(0, SMALL.vocabulary, (2, 8), dtype=np.int32)


def logits(params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_forward(params, tokens)).reshape(*tokens.shape, -1)


@jax.jit
def _forward(params, tokens):
    return decoder_flax.merge(SMALL.shape, params)(tokens)


def loss_of(model: Decoder, *, penalties: bool) -> float:
    loss, count = jax.jit(model.loss_fn(penalties=penalties))(model.init(0), TOKENS)
    assert int(count) == 2 * 7
    return float(loss)


def test_describing_a_model_does_not_load_jax():
    modules = "diloco_cli.models, diloco_cli.data, diloco_cli.worker.engines.optimizers"
    probe = f"import sys, {modules}; print(*{{'jax', 'flax', 'optax'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).split() == []


@pytest.mark.parametrize(
    "size, millions", [("tiny", 1), ("small", 10), ("50m", 50), ("150m", 150), ("1b", 1000)]
)
def test_a_named_size_is_what_its_name_says(size, millions):
    assert parameters(Decoder(size)) / 1e6 == pytest.approx(millions, rel=0.06)


def test_explicit_numbers_override_the_named_size():
    shape = Decoder("small", layers=3).shape
    assert (shape.layers, shape.width, shape.kv_heads) == (3, 384, 2)


def test_without_kv_heads_every_given_head_has_its_own():
    assert Decoder(width=96, heads=3).shape.kv_heads == 3


@pytest.mark.parametrize(
    "asked, key, said, hint",
    [
        ({"size": "huge"}, "size", "no decoder of size 'huge'", "tiny"),
        ({"width": 130, "heads": 4}, "width", "width 130 cannot be shared by 4 heads", "128"),
        ({"width": 12, "heads": 4}, "width", "heads of 3", "multiple of 8"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads", "4 heads", "[1, 2, 4]"),
    ],
)
def test_an_impossible_shape_names_the_option_and_a_way_out(asked, key, said, hint):
    with pytest.raises(RegistryError) as caught:
        models.build({"kind": "decoder", **asked})
    assert caught.value.key == key
    assert said in caught.value.message and hint in (caught.value.hint or "")


def test_first_weights_depend_on_seed_and_name_only():
    deeper = Decoder(layers=3, width=16, heads=4, kv_heads=2, ffn=24, vocabulary=50)
    name = "blocks.01.attention.q"
    np.testing.assert_array_equal(SMALL.init(7)[name], deeper.init(7)[name])
    assert not np.array_equal(SMALL.init(7)[name], SMALL.init(8)[name])
    assert not np.array_equal(SMALL.init(7)[name], SMALL.init(7)["blocks.00.attention.q"])


def test_first_weights_fit_the_tensors():
    drawn = {name: (values.shape, values.dtype) for name, values in SMALL.init(0).items()}
    wanted = {tensor.name: (tensor.shape, np.float32) for tensor in SMALL.tensors()}
    assert drawn == wanted
    assert [tensor.name for tensor in SMALL.tensors() if tensor.embedding] == ["embed"]


def test_the_network_has_exactly_the_named_tensors():
    described = {tensor.name: tensor.shape for tensor in SMALL.tensors()}
    assert decoder_flax.names(SMALL.shape) == described


def test_a_token_sees_the_past_and_not_the_future():
    changed, params = TOKENS.copy(), SMALL.init(0)
    changed[0, 5] = (changed[0, 5] + 1) % SMALL.vocabulary
    differs = np.abs(logits(params, TOKENS) - logits(params, changed)).max(axis=-1)
    assert (differs[0, :5] == 0).all() and (differs[0, 5:] > 0).all()
    assert (differs[1] == 0).all()


def test_the_order_of_the_past_matters():
    swapped, params = TOKENS[:, [1, 0, *range(2, 8)]], SMALL.init(0)
    assert np.abs(logits(params, TOKENS) - logits(params, swapped))[0, -1].max() > 1e-4


def test_an_untrained_model_knows_nothing_and_the_penalty_is_for_training_only():
    model = dataclasses.replace(SMALL, layers=1, z_loss=0.1)
    plain = loss_of(model, penalties=False)
    assert plain == pytest.approx(np.log(SMALL.vocabulary), abs=1.0)
    # The logarithm of the sum over all tokens is about log(50) for each, squared 15.
    assert loss_of(model, penalties=True) == pytest.approx(plain + 1.5, abs=0.7)


def test_the_network_agrees_with_a_plain_account_of_it():
    """Written again in numpy, head by head and token by token, in double precision."""
    params = SMALL.init(3)
    # Norms start at one; other values show that each is applied in its place.
    source = np.random.default_rng(5)
    for name, values in params.items():
        if values.ndim == 1:
            params[name] = source.uniform(0.5, 1.5, values.shape).astype(np.float32)
    expected = np.stack([_by_hand(params, row) for row in TOKENS])
    np.testing.assert_allclose(logits(params, TOKENS), expected, rtol=1e-4, atol=1e-4)


def _by_hand(params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    shape = SMALL.shape
    weights = {name: values.astype(np.float64) for name, values in params.items()}
    x = weights["embed"][tokens]
    for number in range(shape.layers):
        w = {name.removeprefix(f"blocks.{number:02d}."): values for name, values in weights.items()}
        h = _norm(x, w["attention.norm"])
        groups = shape.heads // shape.kv_heads
        heads = []
        for head in range(shape.heads):
            q = _turn(_norm(h @ _head(w["attention.q"], head), w["attention.q_norm"]))
            k = _turn(_norm(h @ _head(w["attention.k"], head // groups), w["attention.k_norm"]))
            v = h @ _head(w["attention.v"], head // groups)
            scores = q @ k.T / np.sqrt(shape.head)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(share / share.sum(axis=1, keepdims=True) @ v)
        x = x + np.concatenate(heads, axis=1) @ w["attention.o"]
        h = _norm(x, w["ffn.norm"])
        gate = h @ w["ffn.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn.up"])) @ w["ffn.down"]
    return _norm(x, weights["norm"]) @ weights["embed"].T


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale


def _head(matrix: np.ndarray, number: int) -> np.ndarray:
    return matrix[:, number * SMALL.shape.head : (number + 1) * SMALL.shape.head]


def _turn(x: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * np.outer(np.arange(len(x)), SMALL.rope_theta ** (-np.arange(half) / half))
    )
    return np.concatenate([turned.real, turned.imag], axis=1)
