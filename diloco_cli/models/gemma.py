"""Gemma 4's text decoder: its options, from which its shape follows.

Most layers see a window of tokens, some see all; these have wider heads and fewer of keys.
Every part is normed before and after, scores are not scaled, the embedding is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from diloco_cli.errors import RegistryError
from diloco_cli.models.decoder import PositiveInt, divisors
from diloco_cli.models.positions import Rope
from diloco_cli.models.protocol import models
from diloco_cli.models.transformer import AttentionShape, Shape, Transformer


class GemmaSize(NamedTuple):
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    full_kv_heads: int
    head: int
    full_head: int


GEMMA_SIZES = {
    "tiny": GemmaSize(6, 128, 512, 4, 2, 1, 32, 64),
    # 11.9 B with the whole vocabulary. Ours: Google has not said how its 12 B model is made.
    "12b": GemmaSize(48, 3840, 15360, 16, 8, 2, 256, 512),
}


@models.register("gemma4")
@dataclass(frozen=True)
class Gemma4(Transformer):
    """Gemma 4's dense text decoder: layers that see a window and layers that see everything."""

    size: str = "12b"
    """A named size: tiny (for trials, with a small vocabulary) or 12b."""

    layers: PositiveInt | None = None
    """Blocks, a multiple of the pattern's; as in `size` when left out."""

    width: PositiveInt | None = None
    """Numbers a token is represented by; as in `size` when left out."""

    ffn: PositiveInt | None = None
    """Hidden width of a block; as in `size` when left out."""

    heads: PositiveInt | None = None
    """Attention heads; as in `size` when left out."""

    kv_heads: PositiveInt | None = None
    """Heads of keys and values in layers with a window; as in `size` when left out."""

    full_kv_heads: PositiveInt | None = None
    """The same in layers that see everything; as in `size` when left out."""

    head: PositiveInt | None = None
    """Numbers of a head in layers with a window; as in `size` when left out."""

    full_head: PositiveInt | None = None
    """The same in layers that see everything; as in `size` when left out."""

    vocabulary: Annotated[int, Field(ge=2)] = 262_144
    """Different tokens; must cover the tokenizer's."""

    pattern: Annotated[str, Field(pattern="^[sf]*f$")] = "sssssf"
    """The order of the layers, repeated: s sees a window (it slides), f everything."""

    window: PositiveInt = 512
    """Tokens that a layer with a window sees, itself included."""

    value_is_key: bool = True
    """Whether layers that see everything use their keys as values."""

    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """Longest wavelength of the position encoding in layers with a window."""

    full_rope_theta: Annotated[float, Field(gt=1)] = 1_000_000.0
    """The same in layers that see everything."""

    full_turned: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a head that positions turn in layers that see everything."""

    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """What norms add to the mean square."""

    softcap: Annotated[float, Field(gt=0)] | None = None
    """Logits are squeezed to stay below it; not at all when left out."""

    scalars: tuple[float, ...] | None = None
    """What each layer's result is multiplied by, in an imported model; 1 when left out."""

    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a penalty on large logits, for long runs; training only."""

    def __post_init__(self) -> None:
        if self.size not in GEMMA_SIZES:
            raise RegistryError(
                f"There is no gemma4 of size {self.size!r}.",
                hint=f"Sizes are {', '.join(GEMMA_SIZES)}; or give layers, width, ffn and heads.",
                key="size",
            )
        shape, period = self.shape, len(self.pattern)
        if shape.layers % period:
            raise RegistryError(
                f"{shape.layers} layers are not the pattern {self.pattern} some times over.",
                hint=f"Set layers to a multiple of {period}, or choose another pattern.",
                key="layers" if self.layers else "pattern",
            )
        if self.scalars is not None and len(self.scalars) != shape.layers:
            raise RegistryError(
                f"There are {len(self.scalars)} scalars for {shape.layers} layers.", key="scalars"
            )
        for key, attention in (("kv_heads", shape.attention[0]), ("full_kv_heads", self._full)):
            if attention.heads % attention.kv_heads:
                raise RegistryError(
                    f"{attention.heads} heads cannot share {attention.kv_heads} {key} evenly.",
                    hint=f"Choose {key} among {divisors(attention.heads)}.",
                    key=key,
                )
            if attention.head % 2:
                wrong = "full_head" if key.startswith("full") else "head"
                raise RegistryError(
                    f"{wrong} is {attention.head}, and positions are encoded in pairs of numbers.",
                    key=wrong,
                )

    @property
    def _full(self) -> AttentionShape:
        return self.shape.attention[-1]

    def tensor_counts(self) -> dict[str, int]:
        sliding, full = self.shape.attention[0], self._full
        return {
            "heads": sliding.heads,
            "kv_heads": sliding.kv_heads,
            "full_kv_heads": full.kv_heads,
        }

    @property
    def penalty(self) -> float:
        return self.z_loss

    def _shape(self) -> Shape:
        """Fills in from `size` whatever was left out."""
        named = GEMMA_SIZES[self.size]
        width, heads = self.width or named.width, self.heads or named.heads
        sliding = AttentionShape(
            heads=heads,
            kv_heads=self.kv_heads or named.kv_heads,
            head=self.head or named.head,
            rope=Rope(self.rope_theta),
            window=self.window,
            value_norm=True,
            scale=1.0,
        )
        full = sliding._replace(
            kv_heads=self.full_kv_heads or named.full_kv_heads,
            head=self.full_head or named.full_head,
            rope=Rope(self.full_rope_theta, "proportional", share=self.full_turned),
            window=None,
            value_is_key=self.value_is_key,
        )
        return Shape(
            layers=self.layers or named.layers,
            width=width,
            ffn=self.ffn or named.ffn,
            vocabulary=self.vocabulary,
            attention=tuple(sliding if each == "s" else full for each in self.pattern),
            eps=self.eps,
            post_norms=True,
            activation="gelu",
            embed_scale=width**0.5,
            softcap=self.softcap,
            scalars=self.scalars or (),
        )
