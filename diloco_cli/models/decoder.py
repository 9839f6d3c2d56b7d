"""The decoder: its options, from which its shape follows.

Described without JAX, so that a server can cut it into fragments and draw its first
weights; the arithmetic is in decoder_flax.py and imported only to train. With its options it
is Qwen3 (as it stands), Qwen3-MoE (`experts`), Llama (`qk_norm: false`) or Qwen2 (and
`bias: qkv`), to the bit of rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from diloco_cli.errors import RegistryError
from diloco_cli.models.positions import rope_of
from diloco_cli.models.protocol import models
from diloco_cli.models.transformer import AttentionShape, ExpertShape, Shape, Transformer

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


@models.register("decoder")
@dataclass(frozen=True)
class Decoder(Transformer):
    """A decoder-only transformer: RMSNorm, RoPE, SwiGLU, grouped queries, tied embeddings.

    Qwen3; with other options Qwen3-MoE, Llama or Qwen2.
    """

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
    """Hidden width of a block, or of each expert; when left out 8/3 of the width over all that a
    token takes, rounded up to a multiple of 64."""

    vocabulary: Annotated[int, Field(ge=2)] = 256
    """Different tokens; must cover the tokenizer's."""

    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """Longest wavelength of the position encoding; more for long sequences."""

    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a penalty on large logits, for long runs; training only."""

    head: PositiveInt | None = None
    """Numbers of a head; width ÷ heads when left out."""

    tied: bool | None = None
    """Whether the embedding is also the output; true when left out."""

    qk_norm: bool | None = None
    """Whether queries and keys are normed; true when left out. Llama and Qwen2 do not."""

    bias: Literal["qkv", "qkvo"] | None = None
    """The projections of attention that have a bias; none when left out. Qwen2 has `qkv`."""

    eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """What norms add to the mean square; 1e-6 when left out."""

    rope: dict[str, Any] | None = None
    """A scaling of positions for longer sequences: {kind: linear, factor}, {kind: llama3, factor,
    original, low, high} or {kind: yarn, factor, original, beta_fast, beta_slow}."""

    experts: Annotated[int, Field(ge=2)] | None = None
    """Feed-forwards of a block, of which every token takes `active`; one when left out."""

    active: PositiveInt | None = None
    """How many of the experts a token takes; 2 when left out."""

    renormalised: bool | None = None
    """Whether the shares of the experts that a token takes add up to 1; true when left out."""

    balance: Annotated[float, Field(ge=0)] | None = None
    """Weight of a penalty on experts that get more than their share of a batch; training only,
    and local to a region. 0.01 when left out."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise RegistryError(
                f"There is no decoder of size {self.size!r}.",
                hint=f"Sizes are {', '.join(SIZES)}; or give layers, width and heads.",
                key="size",
            )
        self._check_experts()
        width, attention = self.shape.width, self.shape.attention[0]
        heads, kv_heads = attention.heads, attention.kv_heads
        if self.head is not None and self.head % 2:
            raise RegistryError(
                f"head is {self.head}, and positions are encoded in pairs of numbers.",
                hint=f"Set head to an even number, such as {self.head + 1}.",
                key="head",
            )
        if self.head is None and width % heads:
            raise self._misfit(f"width {width} cannot be shared by {heads} heads")
        if self.head is None and attention.head % 2:
            raise self._misfit(
                f"width {width} over {heads} heads gives heads of {attention.head}, "
                "and positions are encoded in pairs of numbers"
            )
        if heads % kv_heads:
            raise RegistryError(
                f"{heads} heads cannot share {kv_heads} kv_heads evenly.",
                hint=f"Choose kv_heads among {divisors(heads)}.",
                key="kv_heads" if self.kv_heads else "heads",
            )

    def _check_experts(self) -> None:
        if self.experts is None:
            for key in ("active", "renormalised", "balance"):
                if getattr(self, key) is not None:
                    raise RegistryError(
                        f"{key} is {getattr(self, key)}, but there are no experts.",
                        hint=f"Set experts, or remove {key}.",
                        key=key,
                    )
        elif (self.active or 2) > self.experts:
            raise RegistryError(
                f"A token cannot take {self.active or 2} of {self.experts} experts.",
                hint=f"Set active to {self.experts} or less.",
                key="active",
            )

    def _misfit(self, said: str) -> RegistryError:
        width, multiple = self.shape.width, 2 * self.shape.attention[0].heads
        nearest = max(multiple, round(width / multiple) * multiple)
        hint = f"Set width to a multiple of {multiple}, such as {nearest}, or set head."
        return RegistryError(f"{said}.", hint=hint, key="width")

    @property
    def penalty(self) -> float:
        return self.z_loss

    @property
    def balance_weight(self) -> float:
        return 0.01 if self.balance is None else self.balance

    def _shape(self) -> Shape:
        """Fills in from `size` whatever was left out."""
        named = SIZES[self.size]
        width = self.width or named.width
        heads = self.heads or named.heads
        attention = AttentionShape(
            heads=heads,
            kv_heads=self.kv_heads or (heads if self.heads else named.kv_heads),
            head=self.head or width // heads,
            rope=rope_of(self.rope_theta, self.rope),
            qk_norm=self.qk_norm is not False,
            bias=self.bias or "",
        )
        experts = None
        if self.experts is not None:
            experts = ExpertShape(self.experts, self.active or 2, self.renormalised is not False)
        return Shape(
            layers=self.layers or named.layers,
            width=width,
            ffn=self.ffn or math.ceil(width * 8 / 3 / (experts.active if experts else 1) / 64) * 64,
            vocabulary=self.vocabulary,
            attention=(attention,),
            eps=self.eps or 1e-6,
            tied=self.tied is not False,
            experts=experts,
        )


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
