"""JSON lines and Parquet without a preparation, and rows that a lab's own function gives."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.core.lanes import Cursor
from diloco_cli.data import Stream, datasets, next_windows, small_corpora
from diloco_cli.errors import RegistryError, SpecError
from tests.data import corpora


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(small_corpora, "token_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def asked(folder: Path, kind: str, **more) -> dict:
    tokenizer = {"kind": "hf", "file": str(corpora.write_tokenizer(folder))}
    files = [str(folder / f"*.{kind}*")]
    return {"kind": kind, "files": files, "tokenizer": tokenizer, "lanes": 4, **more}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_small_corpora_are_tokenized_once_and_read_like_prepared_ones(tmp_path, cache, name):
    write = corpora.write_table if name == "a.parquet" else corpora.write_lines
    write(tmp_path / name, corpora.documents(200), field="body")
    kind = name.split(".")[1]
    dataset = datasets.build(asked(tmp_path, kind, field="body", mask="documents"))
    stream = dataset.open(0, 4, 8)
    (folder,) = cache.iterdir()
    made = (folder / "00000.bin").stat().st_mtime_ns
    again = dataset.open(0, 4, 8)
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert (folder / "00000.bin").stat().st_mtime_ns == made and again.order == stream.order
    assert stream.separator == 0 and dataset.vocabulary == 320
    assert 0.01 < stream.apart.size / stream.training.size < 0.15
    np.testing.assert_array_equal(stream.batch(stream.start())[0], again.batch(again.start())[0])
    write(tmp_path / name, corpora.documents(210), field="body")
    assert dataset.open(0, 4, 8).order.named.digest != stream.order.named.digest


def test_small_corpora_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch):
    corpora.write_lines(tmp_path / "a.jsonl", corpora.documents(20))
    with pytest.raises(RegistryError, match="needs a tokenizer of kind hf"):
        datasets.build({**asked(tmp_path, "jsonl"), "tokenizer": {"kind": "bytes"}})
    with pytest.raises(SpecError, match="is not called like a parquet file"):
        datasets.build({**asked(tmp_path, "jsonl"), "kind": "parquet"}).find()
    with pytest.raises(SpecError, match="line 1: there is no field 'body'"):
        datasets.build(asked(tmp_path, "jsonl", field="body")).open(0, 4, 8)
    monkeypatch.setattr(small_corpora, "LARGEST", 100)
    with pytest.raises(SpecError, match="too many to tokenize at every start"):
        datasets.build(asked(tmp_path, "jsonl")).open(0, 4, 8)
    looking: Any = datasets.build(asked(tmp_path, "jsonl"))
    with pytest.raises(SpecError, match="too many to tokenize at every start"):
        looking.look(8)


LOADER = """
import numpy as np

class Corpus:
    def __init__(self, sequence, count):
        rows = np.arange(count * (sequence + 1)).reshape(count, -1)
        self.training, self.heldout = rows[:-3], rows[-3:]

def corpus(sequence, count=50):
    return Corpus(sequence, count)

def wrong(sequence, what):
    made = Corpus(sequence, 50)
    if what == "short":
        made.training = made.training[:, :-1]
    if what == "floats":
        made.training = made.training / 2
    if what == "raises":
        raise OSError("the store is away")
    if what == "none":
        return None
    return made
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch) -> Iterator[str]:
    (tmp_path / "own_corpus.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_corpus"
    sys.modules.pop("own_corpus", None)


def opened(module: str, function: str = "corpus", batch: int = 4, **options) -> Stream:
    asked = {"kind": "python", "object": f"{module}:{function}", "vocabulary": 1000, "lanes": 4}
    return datasets.build({**asked, "options": options}).open(0, batch, 8)


def test_rows_of_an_own_loader_are_each_read_once_an_epoch(module: str):
    stream = opened(module)
    lanes, positions, _ = next_windows(stream.start(), 2 * 47)
    starts = stream.order.starts(lanes, positions, 1).tolist()
    assert sorted(starts[:47]) == sorted(starts[47:]) == list(range(47))
    assert starts[:47] != starts[47:]
    tokens, cursor = stream.batch(stream.start())
    assert tokens[:, 0].tolist() == [9 * start for start in starts[:4]]
    stored = Cursor.of(json.loads(json.dumps(cursor.as_record())))
    np.testing.assert_array_equal(
        opened(module).batch(stored)[0], opened(module, batch=8).batch(stream.start())[0][4:]
    )
    held = np.concatenate(stream.heldout(1))
    assert set(held[:, 0].tolist()) == {9 * 47, 9 * 48, 9 * 49}


@pytest.mark.parametrize(
    "what, said",
    [
        ("short", r"row \d+ of own_corpus:wrong: 9 whole numbers are needed, it has \[8\]"),
        ("floats", r"it has \[9\] of float64"),
        ("raises", "failed: OSError: the store is away"),
        ("none", "gave something else"),
    ],
)
def test_what_an_own_loader_does_wrong_is_said(module: str, what: str, said: str):
    with pytest.raises(SpecError, match=said):
        stream = opened(module, "wrong", what=what)
        stream.batch(stream.start())


def test_an_own_loader_that_is_not_there_or_not_named(module: str):
    with pytest.raises(SpecError, match="failed: ModuleNotFoundError"):
        opened("no_such_module_at_all")
    with pytest.raises(SpecError, match="failed: AttributeError"):
        opened(module, "nothing")
    with pytest.raises(RegistryError, match="object is 'own_corpus'"):
        datasets.build({"kind": "python", "object": "own_corpus", "vocabulary": 9})
    with pytest.raises(RegistryError, match="no separator says where one ends"):
        asked = {"kind": "python", "object": "a:b", "vocabulary": 9, "mask": "documents"}
        datasets.build(asked)
    with pytest.raises(SpecError, match="there is a token"):
        stream = opened(module, count=500)
        stream.batch(stream.start(100))
