"""Gemma 4's layers of two kinds: in every form, by name, and at 12 B."""

from typing import Any

import jax
import numpy as np
import pytest

from diloco_cli.errors import RegistryError
from diloco_cli.models import LossForm, decoder_flax, models, parameters
from diloco_cli.models.gemma import Gemma4
from diloco_cli.worker.engines.jax_engine import use_compile_cache
from diloco_cli.worker.engines.placement import place_model
from tests.models.plain_attention import by_hand, queries_keys_values

use_compile_cache()

SIZES: dict[str, Any] = {
    **{"size": "tiny", "layers": 4, "pattern": "sf", "width": 16, "ffn": 24, "vocabulary": 50},
    **{"heads": 2, "kv_heads": 1, "full_kv_heads": 1, "head": 8, "full_head": 12, "window": 5},
}
SMALL = Gemma4(**SIZES, scalars=(1.0, 0.5, 2.0, 1.0))
TOKENS = np.random.default_rng(1).integers(0, 50, (2, 13), dtype=np.int32)


def test_the_named_size_is_12_b_whose_embedding_is_the_output():
    model = models.build({"kind": "gemma4", "size": "12b"})
    assert 11.5e9 < parameters(model) < 12.5e9
    heads = {tensor.shape for tensor in model.tensors() if tensor.name.endswith(".attention.q")}
    assert heads == {(3840, 16 * 256), (3840, 16 * 512)}
    assert not any(tensor.name == "output" for tensor in model.tensors())


def test_scanned_by_turns_it_is_the_same_loss_and_slope():
    weights = SMALL.init(0)
    plain = jax.jit(jax.value_and_grad(SMALL.loss_fn(), has_aux=True))
    (loss, _), slope = plain(weights, TOKENS)
    form = LossForm(remat="block", chunks=3)
    placement = place_model(SMALL, stacked=True)
    assert decoder_flax.names(SMALL.shape, form) == placement.shapes
    assert placement.shapes["turns.01.attention.q"] == (2, 16, 24)
    scanned = jax.jit(jax.value_and_grad(SMALL.loss_fn(form=form), has_aux=True))
    (again, _), stacks = scanned(placement.place(weights), TOKENS)
    assert float(again) == pytest.approx(float(loss), abs=1e-5)
    for name, values in placement.fetch(stacks).items():
        np.testing.assert_allclose(values, slope[name], atol=2e-5, err_msg=name)


def test_a_layer_with_a_window_sees_so_many_tokens_in_any_program():
    qkv = queries_keys_values(batch=2, sequence=12, heads=4, kv_heads=2, head=8)
    wanted = by_hand(*qkv, window=5)
    from diloco_cli.models.attention_flax import attend, in_parts

    assert np.abs(wanted - by_hand(*qkv)).max() > 0.01
    np.testing.assert_allclose(attend(*qkv, LossForm(), window=5), wanted, atol=2e-6)
    np.testing.assert_allclose(in_parts(*qkv, 3, window=5), wanted, atol=2e-6)


@pytest.mark.parametrize(
    "asked, key",
    [
        ({"size": "13b"}, "size"),
        ({"layers": 47}, "layers"),
        ({"pattern": "ffs"}, "pattern"),
        ({"full_kv_heads": 3}, "full_kv_heads"),
        ({"full_head": 255}, "full_head"),
        ({"scalars": (1.0,)}, "scalars"),
    ],
)
def test_an_impossible_shape_names_the_option(asked, key):
    with pytest.raises(RegistryError) as caught:
        models.build({"kind": "gemma4", **asked})
    assert caught.value.key == key
