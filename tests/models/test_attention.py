"""Every program for attention computes the same, and says where it cannot run."""

import jax
import numpy as np
import pytest

from diloco_cli.errors import SpecError
from diloco_cli.models import LossForm, attention_flax
from diloco_cli.models.attention_flax import attend, checked, choose, in_parts, splash
from tests.models.plain_attention import by_hand, queries_keys_values

SMALL = queries_keys_values(batch=2, sequence=12, heads=4, kv_heads=2, head=8)


def test_it_is_what_a_plain_account_says():
    mixed = np.asarray(attend(*SMALL, LossForm()))
    np.testing.assert_allclose(mixed, by_hand(*SMALL), atol=2e-6)


def test_some_queries_at_a_time_are_all_of_them():
    mixed = np.asarray(in_parts(*SMALL, 3))
    np.testing.assert_allclose(mixed, by_hand(*SMALL), atol=2e-6)


def test_so_are_their_slopes():
    def slopes(attention):
        total = jax.jit(jax.grad(lambda qkv: (attention(*qkv) ** 2).sum()))
        return total(SMALL)

    wanted = slopes(lambda q, k, v: attend(q, k, v, LossForm()))
    for ours, theirs in zip(slopes(lambda q, k, v: in_parts(q, k, v, 3)), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_long_sequences_are_done_in_parts_where_memory_is_dear(monkeypatch):
    used = []
    monkeypatch.setattr(attention_flax, "QUERIES", 4)
    monkeypatch.setattr(attention_flax, "in_parts", lambda *given, **_: used.append(given[3]))
    attend(*SMALL, LossForm(remat="block"))
    assert used == [4]
    attend(*SMALL, LossForm())
    assert used == [4]


def test_the_pallas_kernel_computes_the_same():
    """Interpreted, which says that we call it as it wants to be; not how fast it is."""
    long = queries_keys_values(batch=1, sequence=256, heads=2, kv_heads=1, head=16)
    mixed = np.asarray(splash(*long, interpret=True))
    np.testing.assert_allclose(mixed, by_hand(*long), atol=2e-5)


@pytest.mark.parametrize(
    "platform, compute, sequence, head, chosen",
    [
        ("cpu", "bfloat16", 2048, 128, "xla"),
        ("gpu", "bfloat16", 2048, 128, "cudnn"),
        ("gpu", "float32", 2048, 128, "xla"),
        ("gpu", "bfloat16", 2048, 256, "xla"),
        ("tpu", "float32", 2048, 128, "splash"),
        ("tpu", "bfloat16", 100, 128, "xla"),
    ],
)
def test_a_device_gets_the_program_that_suits_it(platform, compute, sequence, head, chosen):
    assert choose(platform, compute, sequence, head) == chosen


@pytest.mark.parametrize("asked", ["cudnn", "splash"])
def test_a_program_for_other_devices_is_refused_before_anything_is_compiled(asked):
    with pytest.raises(SpecError, match=f"inner.attention is '{asked}', but the devices here"):
        checked(LossForm(attention=asked, compute="bfloat16"))
