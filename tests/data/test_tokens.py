"""Prepared tokens are read once an epoch, in mixes by weight, and damage is never trained on."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_cli import assemble
from diloco_cli.core.lanes import Cursor, LanePosition
from diloco_cli.data import Stream, datasets, next_windows
from diloco_cli.data.hf_tokenizer import open_tokenizer
from diloco_cli.data.order import MixedOrder
from diloco_cli.data.prepare import Preparation, prepare
from diloco_cli.data.sources import find_sources
from diloco_cli.data.tokens import PreparedTokens
from diloco_cli.errors import RegistryError, SpecError, StoreError
from diloco_cli.spec.load import SpecErrors
from diloco_cli.worker.text_codec import codec_of
from tests.cli.harness import SPEC, diloco
from tests.data import corpora

EIGHT = 8


def prepared(folder: Path, count: int = 200, first: int = 0, **changes) -> Path:
    source = corpora.write_lines(folder / "in" / "a.jsonl", corpora.documents(count, first))
    tokenizer = open_tokenizer(corpora.write_tokenizer(folder, changes.pop("vocabulary", 320)))
    asked = {"shards": 3, "share": 0.1, **changes}
    prepare(Preparation(tuple(find_sources([str(source)])), tokenizer, folder / "out", **asked))
    return folder / "out"


def opened(choice: dict, batch: int = 4, seed: int = 0) -> Stream:
    return datasets.build({"kind": "tokens", "lanes": 4, **choice}).open(seed, batch, EIGHT)


def everything(stream: Stream, windows: int) -> list[int]:
    lanes, positions, _ = next_windows(stream.start(), windows)
    return stream.order.starts(lanes, positions, 1).tolist()


def test_a_prepared_folder_is_read_once_an_epoch_and_resumes_exactly(tmp_path: Path):
    stream = opened({"folder": str(prepared(tmp_path))})
    windows = stream.order.windows
    starts = everything(stream, windows)
    assert (
        len({start // EIGHT for start in starts}) == windows == (stream.training.size - 1) // 8 - 1
    )
    straight, cursor = [], stream.start()
    for _ in range(10):
        tokens, cursor = stream.batch(cursor)
        straight.append(tokens)
        cursor = Cursor.of(json.loads(json.dumps(cursor.as_record())))
    assert straight[0].dtype == np.int32 and straight[0].shape == (4, 9)
    again, _ = opened({"folder": str(tmp_path / "out")}, batch=8).batch(stream.start(8))
    np.testing.assert_array_equal(again, np.concatenate(straight[2:4]))


def test_the_order_goes_by_what_is_in_the_folder_not_by_where_it_is(tmp_path: Path):
    here, there, other = (
        opened({"folder": str(prepared(tmp_path / name, first=first))})
        for name, first in (("here", 0), ("there", 0), ("other", 5))
    )
    assert here.order == there.order != other.order
    assert here.order.named.settings == other.order.named.settings
    np.testing.assert_array_equal(here.heldout(2), there.heldout(2))


def mixed(tmp_path: Path, *weights: float | None) -> Stream:
    parts = []
    for number, weight in enumerate(weights):
        folder = prepared(tmp_path / str(number), 100 + 60 * number, 1000 * number)
        parts.append({"folder": str(folder), **({} if weight is None else {"weight": weight})})
    return opened({"mix": parts})


def corpus_of(order: MixedOrder, starts: list[int]) -> np.ndarray:
    begins = [part.begin for part in order.parts]
    return np.searchsorted(begins, starts, side="right") - 1


@pytest.mark.parametrize("weights", [(3, 1, 1), (1, 5, 0.5), (None, None, None)])
def test_a_mix_shares_an_epoch_out_by_weight(tmp_path: Path, weights):
    stream = mixed(tmp_path, *weights)
    order = stream.order
    assert isinstance(order, MixedOrder)
    starts = everything(stream, order.windows)
    counts = np.bincount(corpus_of(order, starts))
    asked = zip(weights, order.parts, strict=True)
    exact = np.array([weight or part.windows for weight, part in asked])
    assert np.abs(counts - exact * order.windows / exact.sum()).max() < 1
    # A long way into the epoch the shares hold, too.
    half = np.bincount(corpus_of(order, starts[: order.windows // 2]), minlength=3)
    assert np.abs(half / half.sum() - counts / counts.sum()).max() < 0.1


def test_each_corpus_of_a_mix_is_read_through_before_anything_comes_twice(tmp_path: Path):
    stream = mixed(tmp_path, 1, 5, 0.5)
    order = stream.order
    assert isinstance(order, MixedOrder)
    starts = everything(stream, 6 * order.windows)
    corpora_ = corpus_of(order, starts)
    for number, part in enumerate(order.parts):
        own = np.array(starts)[corpora_ == number]
        # A shift moves a window by less than one.
        seen = np.bincount((own - part.begin) // EIGHT, minlength=part.windows)
        assert len(seen) == part.windows and len(own) == 6 * part.slots
        assert seen.max() - seen.min() <= 1


def test_lanes_of_a_mix_read_no_window_twice(tmp_path: Path):
    stream = mixed(tmp_path, 1, 5, 0.5)
    lanes = Cursor("order", 7, {lane: LanePosition(1, 0) for lane in range(7)})
    numbers, positions, _ = next_windows(lanes, stream.order.windows // 7 * 7)
    by_lanes = stream.order.starts(numbers, positions, 7).tolist()
    alone = everything(stream, stream.order.windows)
    assert by_lanes == alone[: len(by_lanes)]


def test_documents_kept_apart_give_the_separator_to_the_step(tmp_path: Path):
    folder = str(prepared(tmp_path))
    assert opened({"folder": folder}).separator is None
    assert opened({"folder": folder, "mask": "documents"}).separator == 0


def test_held_out_documents_are_listed_by_source(tmp_path: Path, capsys):
    folder = prepared(tmp_path)
    text = SPEC.replace("{kind: python-source}", f"{{kind: tokens, folder: {folder}}}")
    (tmp_path / "run.yaml").write_text(text.replace("heads: 2", "heads: 2, vocabulary: 320"))
    code, out, err = diloco(capsys, "validate", tmp_path / "run.yaml", "--format", "json")
    assert code == 0, err
    (said,) = json.loads(out)["heldout"]
    stream = opened({"folder": str(folder)})
    assert said["files"][0]["path"] == "a.jsonl" and said["bytes"] == stream.apart.size * 2
    assert " documents of 1 file" in said["text"]


def test_what_the_folder_says_is_taken_over_and_shared(tmp_path: Path):
    folder = prepared(tmp_path)
    (tmp_path / "run.yaml").write_text(SPEC)
    data = f"data={{kind: tokens, folder: '{folder}'}}"
    spec = assemble.load_run(tmp_path / "run.yaml", [data, "model.vocabulary=320"]).spec
    digest = open_tokenizer(tmp_path / "tokenizer.json").digest
    assert assemble.shared_settings(spec)["tokenizer"] == digest
    with pytest.raises(SpecErrors, match="is 256 but the tokenizer of data makes 320"):
        assemble.load_run(tmp_path / "run.yaml", [data, "model.vocabulary=256"])
    served = f"data={{kind: tokens, folder: /elsewhere, tokenizer: {{kind: hf, digest: {digest}}}}}"
    serving = assemble.load_run(tmp_path / "run.yaml", [served, "model.vocabulary=320"]).spec
    assert assemble.shared_digest(serving) == assemble.shared_digest(spec)


@pytest.mark.parametrize(
    "choice, key, said",
    [
        ({}, "folder", "needs a `folder` or a `mix`"),
        ({"folder": "a", "mix": [{"folder": "b"}]}, "folder", "one of them"),
        ({"mix": [{"folder": "a", "wait": 1}]}, "mix.0.wait", "wait is no key"),
        ({"mix": [{"weight": 1}]}, "mix.0.folder", "needs a `folder`"),
        ({"mix": [{"folder": "a", "weight": 0}]}, "mix.0.weight", "above 0; got 0"),
        ({"mix": [{"folder": "a", "weight": 1}, {"folder": "b"}]}, "mix", "for some of its"),
    ],
)
def test_a_mix_that_makes_no_sense_is_located(choice, key, said):
    with pytest.raises(RegistryError, match=said) as caught:
        datasets.build({"kind": "tokens", **choice})
    assert caught.value.key == key


def test_folders_of_other_tokenizers_are_not_mixed(tmp_path: Path):
    parts = [{"folder": str(prepared(tmp_path / str(n), vocabulary=n))} for n in (310, 320)]
    with pytest.raises(RegistryError, match="was made with the tokenizer"):
        datasets.build({"kind": "tokens", "mix": parts})


def test_a_separator_of_ones_own_is_known_to_whoever_writes_text(tmp_path: Path):
    folder = prepared(tmp_path, separator=1)
    built = datasets.build({"kind": "tokens", "folder": str(folder)})
    assert isinstance(built, PreparedTokens) and built.tokenizer
    assert built.tokenizer["separator"] == "!" and built.separator == 1
    assert (codec := codec_of({"tokenizer": built.tokenizer})) and codec.end == 1


def test_folders_that_hold_nothing_to_read_are_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="there is no folder"):
        opened({"folder": str(tmp_path / "none")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match="holds no tokens: it is empty"):
        opened({"folder": str(tmp_path / "empty")})
    (tmp_path / "empty" / "progress.json").write_text("{}")
    with pytest.raises(SpecError, match="is not finished"):
        opened({"folder": str(tmp_path / "empty")})


def test_a_damaged_shard_is_exit_code_5(tmp_path: Path):
    folder = prepared(tmp_path)
    shard = folder / "00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(StoreError, match="is damaged: it has") as caught:
        opened({"folder": str(folder)})
    assert caught.value.exit_code == 5


TOKENS = np.random.default_rng(0).integers(0, 500, 4000)


def write_nanogpt(folder: Path) -> None:
    TOKENS[:3600].astype("<u2").tofile(folder / "train.bin")
    TOKENS[3600:].astype("<u2").tofile(folder / "val.bin")


def write_llm_c(folder: Path) -> None:
    for name, part in (("web_train_000001", TOKENS[:3600]), ("web_val_000000", TOKENS[3600:])):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, part.size
        (folder / f"{name}.bin").write_bytes(header.tobytes() + part.astype("<u2").tobytes())


def write_megatron(folder: Path) -> None:
    lengths = np.full(80, 50, "<i4")
    firsts = np.arange(0, 81, 2).astype("<i8")  # Documents of two sequences.
    pointers = (np.arange(80) * 50 * 4).astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 80, firsts.size)
    parts = (head, lengths.tobytes(), pointers.tobytes(), firsts.tobytes())
    (folder / "web_text_document.idx").write_bytes(b"".join(parts))
    TOKENS.astype("<i4").tofile(folder / "web_text_document.bin")


@pytest.mark.parametrize("write", [write_nanogpt, write_llm_c, write_megatron])
def test_files_of_other_programs_are_read_as_they_are(tmp_path: Path, write):
    write(tmp_path)
    choice = {"folder": str(tmp_path), "vocabulary": 500, "heldout": 0.12}
    stream = opened(choice)
    # Of Megatron's the end is held out from the beginning of a document.
    cut = 3500 if write is write_megatron else 3600
    assert stream.training.window(0, cut).tolist() == TOKENS[:cut].tolist()
    assert stream.apart.window(0, 4000 - cut).tolist() == TOKENS[cut:].tolist()
    tokens, _ = stream.batch(stream.start())
    start = everything(stream, 1)[0]
    assert tokens[0].tolist() == TOKENS[start : start + 9].tolist()
    with pytest.raises(SpecError, match=r"there is a token 4\d\d, but `data.vocabulary` is 400"):
        few = opened({**choice, "vocabulary": 400}, batch=64)
        few.batch(few.start())
    with pytest.raises(SpecError, match="do not say how many different tokens"):
        opened({"folder": str(tmp_path)})
    with pytest.raises(SpecError, match="do not say which token ends one"):
        opened({**choice, "mask": "documents"})
    assert opened({**choice, "mask": "documents", "separator": 7}).separator == 7


@pytest.mark.parametrize("write", [write_llm_c, write_megatron])
def test_a_truncated_file_of_other_programs_is_refused(tmp_path: Path, write):
    write(tmp_path)
    path = min(tmp_path.glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(StoreError, match="is damaged: it has"):
        opened({"folder": str(tmp_path), "vocabulary": 500})


@pytest.mark.parametrize("documents", [(0, 81), (0, -82), (0, 1 << 40)])
def test_an_index_that_points_beyond_its_file_is_refused(tmp_path: Path, documents):
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 80, 2)
    parts = (head, np.full(80, 50, "<i4").tobytes(), bytes(640), struct.pack("<2q", *documents))
    (tmp_path / "web.idx").write_bytes(b"".join(parts))
    TOKENS.astype("<i4").tofile(tmp_path / "web.bin")
    with pytest.raises(StoreError, match=r"web\.idx is damaged: it says that a document begins at"):
        opened({"folder": str(tmp_path), "vocabulary": 500})


def test_unknown_binary_files_are_not_taken_for_tokens(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    with pytest.raises(SpecError, match=r"weights.bin is no file of tokens"):
        opened({"folder": str(tmp_path), "vocabulary": 500})


def test_a_mix_of_one_prepared_folder_and_lanes_round_trips_through_a_spec(tmp_path: Path):
    folder = str(prepared(tmp_path))
    built = datasets.build({"kind": "tokens", "mix": [{"folder": folder, "weight": 2}]})
    assert isinstance(built, PreparedTokens) and built.tokenizer
    assert built.tokenizer["file"] == f"{folder}/tokenizer.json"
    assert codec_of({"tokenizer": built.tokenizer}) is not None, "for exports, and to generate"
    (tmp_path / "run.yaml").write_text(SPEC)
    data = f"data={{kind: tokens, mix: [{{folder: '{folder}', weight: 2}}]}}"
    spec = assemble.load_run(tmp_path / "run.yaml", [data, "model.vocabulary=320"]).spec
    again = assemble.spelled_out(spec)
    assert datasets.build(again.data) == replace(built)
