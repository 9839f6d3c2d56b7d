"""Text, a tokenizer and a run, by the commands that the pipeline's comment gives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import corpora

pytestmark = pytest.mark.live

SPEC = """
spec: 1
name: prepared
budget: {tokens: 15_000}
model: {kind: decoder, layers: 1, width: 16, heads: 2, vocabulary: 320}
data:
  kind: tokens
  mix: [{folder: tokens/few, weight: 1}, {folder: tokens/many, weight: 1}]
  mask: documents
  lanes: 8
inner: {batch: 2, sequence: 16, schedule: {kind: constant}}
regions: [{name: left}, {name: right}]
sync: {fragments: 2, every: 8, overlap: 1}
evaluate: {batches: 2, every: 4}
"""


def test_a_run_on_prepared_tokens_learns_and_balances(tmp_path: Path):
    def diloco(*arguments: str) -> None:
        command = [sys.executable, "-m", "diloco_cli", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert ended.returncode == 0, ended.stderr

    (tmp_path / "run.yaml").write_text(SPEC)
    corpora.write_lines(tmp_path / "few.jsonl.gz", corpora.documents(200))
    corpora.write_table(tmp_path / "many.parquet", corpora.documents(600, 200))
    diloco("data", "train-tokenizer", "few.jsonl.gz", "--vocabulary", "320", "--out", "t.json")
    for name in ("few.jsonl.gz", "many.parquet"):
        folder = f"tokens/{name.partition('.')[0]}"
        how = ("--tokenizer", "t.json", "--out", folder, "--shards", "2", "--heldout", "0.1")
        diloco("data", "prepare", name, *how)
    diloco("run", "run.yaml", "--dir", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["balanced"]
    assert summary["loss"]["heldout"] < summary["loss"]["first"] - 0.1
    held = json.loads((tmp_path / "run" / "regions" / "left" / "heldout.json").read_text())
    assert {file["path"] for file in held["files"]} == {
        "tokens/few/few.jsonl.gz",
        "tokens/many/many.parquet",
    }
