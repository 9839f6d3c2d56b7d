"""What decoder-only transformers have in common: tensors, first weights, cuts and costs.

A kind of model turns its options into a `Shape`; everything here and in decoder_flax.py
follows from that. Matrices are inputs × outputs.

    embed                        vocabulary × width; also the output, unless there is `output`
    blocks.00.attention.q        width × heads · head; k, v, o, their norms and biases alike
    blocks.00.ffn.gate           width × hidden; up alike, down the other way; with experts one
                                 of each, experts × width × hidden
    norm, output
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np

from diloco_cli.core.fragments import Tensor
from diloco_cli.models.positions import Rope
from diloco_cli.models.protocol import PLAIN, LossFn, LossForm

QUERIES = 512
"""Attention under `remat: block` works on so many at a time."""


class AttentionShape(NamedTuple):
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head: int
    rope: Rope
    qk_norm: bool = True
    bias: str = ""
    """The projections with a bias: letters of `qkvo`."""
    window: int | None = None
    """Tokens that a token sees, itself included; all before it when None."""
    value_norm: bool = False
    """Values are normed, without a learned scale."""
    value_is_key: bool = False
    """There is no projection for values: keys are, before they are normed and turned."""
    scale: float | None = None
    """What scores are multiplied by; head ** −0.5 when None."""

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head


class ExpertShape(NamedTuple):
    """Several feed-forwards in place of one, of which each token takes some."""

    number: int
    active: int
    """How many a token takes."""
    renormalised: bool = True
    """Whether the shares of those that a token takes add up to 1."""


class Shape(NamedTuple):
    """A transformer with nothing left to choose."""

    layers: int
    width: int
    ffn: int
    vocabulary: int
    attention: tuple[AttentionShape, ...]
    """Of the first layers; the same ones follow in turn until there are enough."""
    eps: float = 1e-6
    tied: bool = True
    post_norms: bool = False
    """What attention and feed-forward give is normed before it is added."""
    activation: str = "silu"
    embed_scale: float = 1.0
    softcap: float | None = None
    """Logits are squeezed to stay below it."""
    scalars: tuple[float, ...] = ()
    """What each layer's result is multiplied by, where that is not 1."""
    experts: ExpertShape | None = None
    """With them `ffn` is the hidden width of each."""

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention[layer % len(self.attention)]


class Transformer(ABC):
    """A model that follows from its shape."""

    @property
    def penalty(self) -> float:
        """Weight of a penalty on large logits; training only."""
        return 0.0

    @property
    def balance_weight(self) -> float:
        """Weight of a penalty on experts that get more than their share; training only."""
        return 0.0

    @cached_property
    def shape(self) -> Shape:
        return self._shape()

    @abstractmethod
    def _shape(self) -> Shape: ...

    @property
    def depth(self) -> int:
        return self.shape.layers

    def tensors(self) -> tuple[Tensor, ...]:
        """Names every tensor, always in the same order."""
        shape = self.shape
        blocks = [
            Tensor(f"blocks.{number:02d}.{name}", dims, parted=len(dims) == 3)
            for number in range(shape.layers)
            for name, dims in block_tensors(shape, number)
        ]
        embed = Tensor("embed", (shape.vocabulary, shape.width), embedding=True)
        output = [] if shape.tied else [Tensor("output", (shape.width, shape.vocabulary))]
        return (embed, *blocks, Tensor("norm", (shape.width,)), *output)

    def init(self, seed: int) -> dict[str, np.ndarray]:
        """Draws the first weights; each tensor's depend on the seed and its own name only."""
        return {tensor.name: self.draw(tensor, seed) for tensor in self.tensors()}

    def draw(self, tensor: Tensor, seed: int) -> np.ndarray:
        """Draws the first weights of one tensor."""
        if len(tensor.shape) == 1:
            fill = np.zeros if tensor.name.endswith("_bias") else np.ones
            return fill(tensor.shape, np.float32)
        digest = hashlib.sha256(tensor.name.encode()).digest()
        source = np.random.Generator(
            np.random.PCG64([seed, *np.frombuffer(digest, "<u4").tolist()])
        )
        # The tied output sums the embedding's rows over the width, so that is their
        # fan-in. Larger inputs were tried (scaled up, or normed): they start worse and
        # were 3 % behind after 250 k tokens. What writes into the residual stream is
        # kept small, so that the stream does not grow with depth.
        fan_in = self.shape.width if tensor.embedding else tensor.shape[-2]
        scale = fan_in**-0.5
        if tensor.name.endswith((".o", ".down")):
            scale /= math.sqrt(2 * self.shape.layers)
        values = source.standard_normal(tensor.shape, np.float32)
        values *= np.float32(scale)
        return values

    def loss_fn(self, *, penalties: bool = True, form: LossForm = PLAIN) -> LossFn:
        from diloco_cli.models.decoder_flax import loss_fn  # Loads JAX and Flax.

        return loss_fn(
            self.shape,
            form,
            z_loss=self.penalty if penalties else 0.0,
            balance=self.balance_weight if penalties else 0.0,
        )

    # On many devices

    def stacks(self) -> dict[str, tuple[str, ...]]:
        shape, turns = self.shape, len(self.shape.attention)
        return {
            stack_name(turns, turn, name): tuple(
                f"blocks.{number:02d}.{name}" for number in range(turn, shape.layers, turns)
            )
            for turn in range(turns)
            for name, _ in block_tensors(shape, turn)
        }

    def tensor_axes(self) -> dict[str, int]:
        """Heads and hidden numbers are dealt out; what sums over them is cut the other way."""
        axes = {
            f"blocks.{number:02d}.{name}": axis + len(dims) - 2
            for number in range(self.shape.layers)
            for name, dims in block_tensors(self.shape, number)
            if (axis := _CUT.get(name)) is not None
        }
        return {"embed": 0, **axes, **({} if self.shape.tied else {"output": 1})}

    def tensor_counts(self) -> dict[str, int]:
        return {
            "heads": math.gcd(*(each.heads for each in self.shape.attention)),
            "kv_heads": math.gcd(*(each.kv_heads for each in self.shape.attention)),
            **({"ffn": self.shape.ffn} if self.shape.experts else {}),
        }

    # What it costs

    def activation_bytes(
        self,
        batch: float,
        sequence: int,
        form: LossForm = PLAIN,
        *,
        tensor: int = 1,
        flash: bool = False,
    ) -> float:
        """Counts some vectors of each layer and token, the scores, and the logits."""
        shape, tokens = self.shape, batch * sequence
        widest = max(each.queries for each in shape.attention)
        heads = max(each.heads for each in shape.attention)
        rounded = 2 if form.compute == "bfloat16" else 4
        # Some of them in float32 in either type. The last block is walked through backwards
        # while it is computed again, which takes twice as many.
        hidden = shape.ffn * (shape.experts.active if shape.experts else 1)
        dealt_out = (4 * widest + 3 * hidden) / tensor
        block = 4 * tokens * (4 * shape.width + dealt_out)
        logits = 2 * 4 * tokens * shape.vocabulary / tensor / form.chunks
        # Scores, their softmax and its slope, in float32.
        queries = min(sequence, QUERIES) if form.remat == "block" else sequence
        scores = 0.0 if flash else 3 * 4 * batch * heads / tensor * sequence * queries
        if form.remat == "block":
            return rounded * tokens * shape.width * shape.layers + max(2 * block + scores, logits)
        return shape.layers * (block + scores) + logits

    def step_flops(self, batch: int, sequence: int) -> float:
        """Two for each weight and token forwards, four backwards; half the scores are masked."""
        shape, tokens = self.shape, batch * sequence
        # The embedding multiplies once, as the tied output; looking a row up costs nothing.
        active = shape.experts.active / shape.experts.number if shape.experts else 1
        weights = sum(
            tensor.size * (active if tensor.parted else 1)
            for tensor in self.tensors()
            if len(tensor.shape) > 1 and (shape.tied or not tensor.embedding)
        )
        scores = sum(
            each.queries * (sequence if each.window is None else min(sequence, 2 * each.window))
            for each in map(shape.attention_of, range(shape.layers))
        )
        return 6.0 * tokens * (weights + scores)


_CUT = {
    **{f"attention.{name}": 1 for name in "qkv"},
    **{"attention.o": 0, "ffn.gate": 1, "ffn.up": 1, "ffn.down": 0},
}
"""The axis of a block's tensors that belongs to heads or hidden numbers."""


def stack_name(turns: int, turn: int, name: str) -> str:
    """What the stack of one tensor of every block is called, or of every `turns`-th block."""
    return f"blocks.{name}" if turns == 1 else f"turns.{turn:02d}.{name}"


def block_tensors(shape: Shape, layer: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names the tensors of a block."""
    width, attention = shape.width, shape.attention_of(layer)
    outputs = {"q": attention.queries, "k": attention.keys, "v": attention.keys, "o": width}
    norms = ("q_norm", "k_norm") if attention.qk_norm else ()
    experts = (shape.experts.number,) if shape.experts else ()
    return [
        ("attention.norm", (width,)),
        ("attention.q", (width, attention.queries)),
        ("attention.k", (width, attention.keys)),
        *([] if attention.value_is_key else [("attention.v", (width, attention.keys))]),
        *((f"attention.{each}_bias", (outputs[each],)) for each in attention.bias),
        *((f"attention.{each}", (attention.head,)) for each in norms),
        ("attention.o", (attention.queries, width)),
        *([("attention.post_norm", (width,))] if shape.post_norms else []),
        ("ffn.norm", (width,)),
        *([("ffn.router", (width, shape.experts.number))] if shape.experts else []),
        ("ffn.gate", (*experts, width, shape.ffn)),
        ("ffn.up", (*experts, width, shape.ffn)),
        ("ffn.down", (*experts, shape.ffn, width)),
        *([("ffn.post_norm", (width,))] if shape.post_norms else []),
    ]
