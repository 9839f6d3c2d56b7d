"""What is posted is what was held between two steps, and nobody waits for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_cli.core.fragments import Fragment, Piece, cut, gather
from diloco_cli.core.unmerged_work import DROP, KEEP, Mix
from diloco_cli.models.decoder import Decoder
from diloco_cli.wire.codecs import NotFinite
from diloco_cli.wire.frame import Header, pack
from diloco_cli.worker.engines import mixed
from diloco_cli.worker.engines.exchange import DeviceExchange, Exchange, HostExchange, exchange_of
from diloco_cli.worker.engines.jax_engine import use_compile_cache
from diloco_cli.worker.engines.placement import Placement, place_model

use_compile_cache()

MODEL = Decoder(layers=3, width=16, heads=2, kv_heads=1, ffn=32, vocabulary=64)
LAYOUT = cut(MODEL.tensors(), 6)
PLAIN, STACKED = place_model(MODEL), place_model(MODEL, stacked=True)
FLOATS, CODES = {"kind": "fp32"}, {"kind": "int4", "block": 32}

ways = pytest.mark.parametrize(
    "exchange",
    [HostExchange(PLAIN), DeviceExchange(PLAIN), DeviceExchange(STACKED)],
    ids=["host", "devices", "devices, stacked"],
)


def header(number: int, codec: dict) -> Header:
    return Header.contribution(
        run="run-1",
        layout=LAYOUT.digest,
        fragment=number,
        size=LAYOUT.fragments[number].size,
        codec=codec,
        base=0,
        region="paris",
    )


def placement(exchange: HostExchange | DeviceExchange) -> Placement:
    return exchange.placement


@ways
@pytest.mark.parametrize("codec", [FLOATS, CODES], ids=["floats", "codes"])
def test_frames_are_of_the_moment_they_were_begun(exchange, codec):
    anchors, local = MODEL.init(0), MODEL.init(1)
    params = placement(exchange).place(local)
    begun = []
    for fragment in LAYOUT.fragments:
        anchor = exchange.keep(fragment, gather(anchors, fragment))
        begun.append(exchange.held(params, fragment, anchor, codec))
    # A step gives up the arrays it takes, and their memory.
    jax.jit(lambda arrays: {name: each * 2 for name, each in arrays.items()}, donate_argnums=0)(
        params
    )
    for fragment, work in zip(LAYOUT.fragments, begun, strict=True):
        said, held = (
            header(fragment.number, codec),
            gather(anchors, fragment) - gather(local, fragment),
        )
        assert work.pack(said, level=1) == pack(said, held)


@ways
def test_posting_waits_for_no_step(exchange):
    """The step in progress is not over, and the frame is begun all the same."""
    params: Any = placement(exchange).place(MODEL.init(1))
    fragment = LAYOUT.fragments[-1]
    array, _ = placement(exchange).place_of(fragment.pieces[0].tensor)
    anchor = exchange.keep(fragment, np.zeros(fragment.size, np.float32))
    said = header(fragment.number, CODES)
    for long in (False, True):  # The first time all of it is compiled.
        params[array] = slow(params[array], 3_000 if long else 1)
        work = exchange.held(params, fragment, anchor, CODES)
        if long:
            assert not params[array].is_ready()
        assert work.pack(said, level=1) == pack(said, -gather(MODEL.init(1), fragment))


@jax.jit
def slow(values: jax.Array, times: int) -> jax.Array:
    """Gives the same values, some seconds later."""
    busy = jnp.full((200, 200), 1e-3)
    busy = jax.lax.fori_loop(0, times, lambda _, each: each @ each, busy)
    return values + jnp.minimum(jnp.abs(busy[0, 0]), 0)


@ways
@pytest.mark.parametrize("mix", [Mix(1.0, 1.0), Mix(0.5, 0.5), KEEP, DROP, Mix(0.0, 0.5)], ids=str)
def test_adopting_moves_one_fragment_as_the_books_say(exchange, mix):
    anchors, news, sent = (MODEL.init(seed) for seed in (0, 1, 2))
    for fragment in LAYOUT.fragments[1:3]:
        local = MODEL.init(3)
        params = placement(exchange).place(local)
        before = {each.number: gather(local, each) for each in LAYOUT.fragments}
        anchor, new, frame = (gather(each, fragment) for each in (anchors, news, sent))
        held = mixed(partial(np.subtract, anchor, before[fragment.number]), mix, frame.copy)
        vectors = [exchange.keep(fragment, each) for each in (anchor, new, frame)]
        flight = vectors[2] if mix.flight else None
        params = exchange.adopt(params, fragment, vectors[0], vectors[1], mix, flight)
        before[fragment.number] = new if held is None else new - held
        for each in LAYOUT.fragments:
            found = placement(exchange).read(params, each)
            np.testing.assert_allclose(found, before[each.number], rtol=0, atol=1e-6)


@ways
def test_what_is_not_finite_is_dropped_and_not_multiplied(exchange):
    fragment = LAYOUT.fragments[0]
    params = placement(exchange).place(
        {name: np.full_like(each, np.nan) for name, each in MODEL.init(0).items()}
    )
    anchor = exchange.keep(fragment, gather(MODEL.init(0), fragment))
    with pytest.raises(NotFinite, match="Value 0 is nan"):
        exchange.held(params, fragment, anchor, CODES).pack(header(0, CODES), level=1)
    params = exchange.adopt(params, fragment, anchor, anchor, DROP, None)
    np.testing.assert_array_equal(
        placement(exchange).read(params, fragment), gather(MODEL.init(0), fragment)
    )


@ways
def test_a_merged_frame_without_its_values_is_a_callers_mistake(exchange):
    fragment = LAYOUT.fragments[0]
    params = placement(exchange).place(MODEL.init(0))
    anchor = exchange.keep(fragment, gather(MODEL.init(0), fragment))
    with pytest.raises(ValueError, match="values were not given"):
        exchange.adopt(params, fragment, anchor, anchor, Mix(1.0, 1.0), None)


def test_fragments_that_differ_in_their_layer_alone_share_a_program():
    exchange = DeviceExchange(STACKED)
    first, second = (
        Fragment(0, (Piece(f"blocks.{layer:02d}.ffn.gate", 0, 16, (16, 32), 0),))
        for layer in range(2)
    )
    names, numbers, form = exchange._form(first)
    assert exchange._form(second)[0] == names and exchange._form(second)[2] == form
    assert exchange._form(second)[1].tolist() != numbers.tolist()


def test_one_processor_works_on_the_host():
    chosen: Exchange = exchange_of(PLAIN)
    assert isinstance(chosen, HostExchange)
