"""The decoder-only transformer: its options, its tensors, its first weights.

Described without JAX, so that a server can cut it into fragments and draw its first
weights; the arithmetic is in decoder_flax.py and imported only to train.

    embed, blocks.00.attention.q, blocks.00.ffn.gate, …, norm
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import RegistryError
from diloco_cli.models.protocol import LossFn, models

PositiveInt = Annotated[int, Field(ge=1)]


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int


SIZES = {
    "tiny": Size(5, 128, 4, 2),  # 1.0 M parameters
    "mini": Size(8, 192, 6, 2),  # 3.2 M
    "small": Size(6, 384, 6, 2),  # 9.5 M
    "50m": Size(8, 768, 12, 4),
    "150m": Size(14, 1024, 16, 4),
    "400m": Size(16, 1536, 24, 6),
    "1b": Size(22, 2048, 16, 4),
}


class Shape(NamedTuple):
    """A decoder with nothing left to choose."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    rope_theta: float

    @property
    def head(self) -> int:
        return self.width // self.heads


@models.register("decoder")
@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer: RMSNorm, RoPE, SwiGLU, grouped queries, tied embeddings."""

    size: str = "tiny"
    """A named size: tiny (1 M), mini, small (10 M), 50m, 150m, 400m, 1b."""

    layers: PositiveInt | None = None
    """Blocks; as in `size` when left out."""

    width: PositiveInt | None = None
    """Numbers a token is represented by; as in `size` when left out."""

    heads: PositiveInt | None = None
    """Attention heads; as in `size` when left out."""

    kv_heads: PositiveInt | None = None
    """Heads of keys and values; as in `size`, or one for each head if `heads` is given."""

    ffn: PositiveInt | None = None
    """Hidden width of a block; 8/3 of the width, rounded up to a multiple of 64, when left out."""

    vocabulary: Annotated[int, Field(ge=2)] = 256
    """Different tokens; must cover the tokenizer's."""

    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """Longest wavelength of the position encoding; more for long sequences."""

    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a penalty on large logits, for long runs; training only."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise RegistryError(
                f"There is no decoder of size {self.size!r}.",
                hint=f"Sizes are {', '.join(SIZES)}; or give layers, width and heads.",
                key="size",
            )
        shape = self.shape
        if shape.width % shape.heads:
            raise self._misfit(
                "width", f"width {shape.width} cannot be shared by {shape.heads} heads"
            )
        if shape.head % 2:
            raise self._misfit(
                "width",
                f"width {shape.width} over {shape.heads} heads gives heads of {shape.head}, "
                "and positions are encoded in pairs of numbers",
                multiple=2 * shape.heads,
            )
        if shape.heads % shape.kv_heads:
            raise RegistryError(
                f"{shape.heads} heads cannot share {shape.kv_heads} kv_heads evenly.",
                hint=f"Choose kv_heads among {_divisors(shape.heads)}.",
                key="kv_heads" if self.kv_heads else "heads",
            )

    def _misfit(self, key: str, said: str, multiple: int = 0) -> RegistryError:
        multiple = multiple or 2 * self.shape.heads
        nearest = max(multiple, round(self.shape.width / multiple) * multiple)
        return RegistryError(
            f"{said}.", hint=f"Set width to a multiple of {multiple}, such as {nearest}.", key=key
        )

    @cached_property
    def shape(self) -> Shape:
        """Fills in from `size` whatever was left out."""
        named = SIZES[self.size]
        width = self.width or named.width
        heads = self.heads or named.heads
        return Shape(
            layers=self.layers or named.layers,
            width=width,
            heads=heads,
            kv_heads=self.kv_heads or (heads if self.heads else named.kv_heads),
            ffn=self.ffn or math.ceil(width * 8 / 3 / 64) * 64,
            vocabulary=self.vocabulary,
            rope_theta=self.rope_theta,
        )

    @property
    def depth(self) -> int:
        return self.shape.layers

    def activation_bytes(self, tokens: float) -> float:
        """Counts some vectors of each layer and token, and the logits, in float32."""
        shape = self.shape
        values = shape.layers * (8 * shape.width + 3 * shape.ffn) + 2 * shape.vocabulary
        return 4 * tokens * values

    def tensors(self) -> tuple[Tensor, ...]:
        """Names every tensor, always in the same order."""
        shape = self.shape
        blocks = [
            Tensor(f"blocks.{number:02d}.{name}", dims)
            for number in range(shape.layers)
            for name, dims in _block(shape)
        ]
        embed = Tensor("embed", (shape.vocabulary, shape.width), embedding=True)
        return (embed, *blocks, Tensor("norm", (shape.width,)))

    def init(self, seed: int) -> dict[str, np.ndarray]:
        """Draws the first weights; each tensor's depend on the seed and its own name only."""
        return {tensor.name: self._draw(tensor, seed) for tensor in self.tensors()}

    def _draw(self, tensor: Tensor, seed: int) -> np.ndarray:
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, np.float32)
        digest = hashlib.sha256(tensor.name.encode()).digest()
        source = np.random.Generator(
            np.random.PCG64([seed, *np.frombuffer(digest, "<u4").tolist()])
        )
        # The tied output sums the embedding's rows over the width, so that is their
        # fan-in. Larger inputs were tried (scaled up, or normed): they start worse and
        # were 3 % behind after 250 k tokens. What writes into the residual stream is
        # kept small, so that the stream does not grow with depth.
        fan_in = self.shape.width if tensor.embedding else tensor.shape[0]
        scale = fan_in**-0.5
        if tensor.name.endswith((".o", ".down")):
            scale /= math.sqrt(2 * self.shape.layers)
        return source.standard_normal(tensor.shape, np.float32) * np.float32(scale)

    def loss_fn(self, *, penalties: bool = True) -> LossFn:
        from diloco_cli.models.decoder_flax import loss_fn  # Loads JAX and Flax.

        return loss_fn(self.shape, z_loss=self.z_loss if penalties else 0.0)


def _block(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    width, keys = shape.width, shape.kv_heads * shape.head
    return [
        ("attention.norm", (width,)),
        ("attention.q", (width, width)),
        ("attention.k", (width, keys)),
        ("attention.v", (width, keys)),
        ("attention.q_norm", (shape.head,)),
        ("attention.k_norm", (shape.head,)),
        ("attention.o", (width, width)),
        ("ffn.norm", (width,)),
        ("ffn.gate", (width, shape.ffn)),
        ("ffn.up", (width, shape.ffn)),
        ("ffn.down", (shape.ffn, width)),
    ]


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
