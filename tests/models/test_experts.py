"""Experts: dense and sorted they are the same, and merging takes each by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_cli.core.fragments import Tensor, cut
from diloco_cli.errors import RegistryError
from diloco_cli.merge.rules import Radial, merge
from diloco_cli.models import LossForm, decoder_flax, models
from diloco_cli.models.decoder import Decoder
from diloco_cli.models.experts_flax import Matrices, Route, dense, ragged, routed
from diloco_cli.models.transformer import ExpertShape
from diloco_cli.worker.engines.jax_engine import use_compile_cache
from diloco_cli.worker.engines.placement import place_model

use_compile_cache()

SHAPE: dict[str, Any] = {
    **{"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 8, "vocabulary": 50},
    **{"experts": 4, "active": 2},
}
SMALL = Decoder(**SHAPE)
SOURCE = np.random.default_rng(1)
TOKENS = SOURCE.integers(0, 50, (2, 13), dtype=np.int32)


def test_sorted_by_expert_or_not_tokens_become_the_same():
    x = jnp.asarray(SOURCE.standard_normal((9, 6), np.float32))
    shapes = ((3, 6, 5), (3, 6, 5), (3, 5, 6))
    gate, up, down = (jnp.asarray(SOURCE.standard_normal(each, np.float32)) for each in shapes)
    route = routed(jnp.asarray(SOURCE.standard_normal((9, 3), np.float32)), ExpertShape(3, 2))

    def by_hand() -> np.ndarray:
        made = np.zeros((9, 6))
        for token in range(9):
            for expert, share in zip(route.chosen[token], route.shares[token], strict=True):
                g, u = x[token] @ gate[expert], x[token] @ up[expert]
                made[token] += share * ((g / (1 + np.exp(-g)) * u) @ down[expert])
        return made

    def total(way, weights: Matrices) -> jax.Array:
        return (way(x, route, weights, jax.nn.silu) ** 2).sum()

    for way in (dense, ragged):
        found = way(x, route, (gate, up, down), jax.nn.silu)
        np.testing.assert_allclose(found, by_hand(), atol=1e-4)
    slopes = [
        jax.jit(jax.grad(lambda w, way=way: total(way, w)))((gate, up, down))
        for way in (dense, ragged)
    ]
    for ours, theirs in zip(*slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_router_that_sends_all_to_one_is_uneven():
    even = routed(jnp.eye(4) * 9, ExpertShape(4, 1))
    biased: Route = routed(jnp.tile(jnp.array([9.0, 0, 0, 0]), (4, 1)), ExpertShape(4, 1))
    assert float(even.uneven) == pytest.approx(1, abs=1e-3)
    assert float(biased.uneven) == pytest.approx(4, rel=0.01)


def test_every_form_is_the_same_loss_with_the_penalty_in_training_only():
    weights = SMALL.init(0)
    plain = jax.jit(jax.value_and_grad(SMALL.loss_fn(), has_aux=True))
    (loss, _), slope = plain(weights, TOKENS)
    assert float(jnp.abs(slope["blocks.00.ffn.router"]).max()) > 0
    bare = float(jax.jit(SMALL.loss_fn(penalties=False))(weights, TOKENS)[0])
    assert bare + 0.009 < float(loss) < bare + 0.04
    placement = place_model(SMALL, stacked=True)
    for compute, close in {"float32": 1e-5, "bfloat16": 2e-2}.items():
        form = LossForm(remat="block", chunks=3, compute=compute)
        assert decoder_flax.names(SMALL.shape, form) == placement.shapes
        scanned = jax.jit(jax.value_and_grad(SMALL.loss_fn(form=form), has_aux=True))
        (again, _), stacks = scanned(placement.place(weights), TOKENS)
        assert float(again) == pytest.approx(float(loss), abs=close)
        for name, values in placement.fetch(stacks).items():
            assert values.dtype == np.float32
            if compute == "float32":
                np.testing.assert_allclose(values, slope[name], atol=2e-5, err_msg=name)


def test_merging_takes_every_expert_by_itself():
    """One region used the first expert only, the other the second: each keeps its length."""
    fragment = cut([Tensor("experts", (2, 3, 4), parted=True)], 1).fragments[0]
    assert [(piece.start, piece.shape) for piece in fragment.pieces] == [
        (0, (1, 3, 4)),
        (1, (1, 3, 4)),
    ]
    first, second = (np.zeros(24, np.float32) for _ in range(2))
    first[:12], second[12:] = 1.0, 100.0
    merged = merge(Radial(), fragment, [(1.0, first), (1.0, second)])
    lengths = [np.linalg.norm(merged[:12]), np.linalg.norm(merged[12:])]
    # Half of the length of the only region that has one, whatever the other expert's is.
    assert lengths == pytest.approx([12**0.5 / 2, 100 * 12**0.5 / 2], rel=1e-5)


def test_tensors_of_others_are_cut_as_before():
    tensors = SMALL.tensors()
    assert {each.name.rpartition(".")[2] for each in tensors if each.parted} == {
        "gate",
        "up",
        "down",
    }
    pieces = [piece for each in cut(tensors, 3).fragments for piece in each.pieces]
    assert sum(piece.tensor == "blocks.00.ffn.gate" for piece in pieces) == 4


def test_only_the_experts_that_a_token_takes_are_counted():
    dense_model = Decoder(**{**SHAPE, "experts": None, "active": None, "ffn": 16})
    router = 2 * 16 * 4
    assert SMALL.step_flops(2, 8) == dense_model.step_flops(2, 8) + 6 * 16 * router


@pytest.mark.parametrize(
    "asked, key", [({"experts": 2, "active": 3}, "active"), ({"balance": 0.1}, "balance")]
)
def test_experts_that_cannot_be_are_refused(asked, key):
    with pytest.raises(RegistryError) as caught:
        models.build({"kind": "decoder", **asked})
    assert caught.value.key == key
