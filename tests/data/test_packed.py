"""Prepared documents that share a window cost what each costs alone."""

from pathlib import Path

import jax
import numpy as np
import pytest

from diloco_cli.data.token_folder import TokenManifest, document_ends, open_shards
from diloco_cli.models import LossForm
from diloco_cli.models.decoder import Decoder
from diloco_cli.worker.engines.jax_engine import use_compile_cache
from tests.data.test_tokens import opened, prepared

use_compile_cache()

MODEL = Decoder(layers=1, width=16, heads=2, vocabulary=320)


def loss_of(tokens: np.ndarray, form: LossForm) -> tuple[float, int]:
    loss, count = jax.jit(MODEL.loss_fn(form=form))(MODEL.init(0), tokens[None].astype(np.int32))
    return float(loss), int(count)


def test_prepared_documents_cost_what_each_costs_alone(tmp_path: Path):
    folder = prepared(tmp_path)
    separator = opened({"folder": str(folder), "mask": "documents"}).separator
    manifest = TokenManifest.read(folder)
    shard = open_shards(folder, manifest)[0][0]
    ends = document_ends(folder, manifest.shards[0])[:2].astype(int)
    packed, each = shard[: ends[-1]], np.split(shard[: ends[-1]], ends[:-1])
    alone = [loss_of(tokens, LossForm()) for tokens in each]
    counted = sum(count for _, count in alone)
    loss, count = loss_of(packed, LossForm(separator=separator))
    assert count == counted == packed.size - 2
    assert loss == pytest.approx(sum(loss * n for loss, n in alone) / counted, abs=1e-5)
