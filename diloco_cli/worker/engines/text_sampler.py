"""A few words that published weights write, for people who watch a run.

The region that evaluates continues the beginning of a held-out text, where `evaluate.sample`
asks for it. It costs at most a hundredth of the time: after a sample none is written for a
hundred times as long as it took.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from diloco_cli.models.transformer import Shape
from diloco_cli.wire.messages import MOST_LETTERS, TextSample
from diloco_cli.worker.text_codec import TextCodec

PROMPT_TOKENS = 48
REST = 100.0


class TextSampler:
    """Writes samples of one model, each after the same beginning."""

    def __init__(
        self, shape: Shape, codec: TextCodec, prompt: Sequence[int], *, tokens: int
    ) -> None:
        self._shape, self._codec, self._tokens = shape, codec, tokens
        self._prompt = [int(token) for token in prompt[:PROMPT_TOKENS]]
        self._rest_until = 0.0

    def sample(
        self, versions: Sequence[int], weights: Mapping[str, np.ndarray], *, last: bool = False
    ) -> TextSample | None:
        """Continues the beginning; None while it is too early for another, unless it is the last.

        The first one takes longest: it compiles.
        """
        from diloco_cli.models.generate_flax import generate

        began = time.monotonic()
        if began < self._rest_until and not last:
            return None
        following = list(
            generate(
                self._shape,
                weights,
                self._prompt,
                tokens=self._tokens,
                temperature=0.5,
                top_p=0.95,
                seed=sum(versions),
            )
        )
        ended = time.monotonic()
        self._rest_until = ended + REST * (ended - began)
        prompt, text = self._codec.decode(self._prompt), self._codec.decode(following)
        return TextSample(
            versions=tuple(versions), prompt=prompt[:MOST_LETTERS], text=text[:MOST_LETTERS]
        )
