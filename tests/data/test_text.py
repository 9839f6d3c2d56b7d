"""Every region reads its own part of the text, and a restart neither repeats nor skips."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.data import Stream, datasets, place_of, shuffled
from diloco_cli.data import text as data
from diloco_cli.data.text import PythonSource, Text
from diloco_cli.errors import RegistryError, SpecError
from diloco_cli.spec.schema import RunSpec


def book(folder: Path, *sizes: int) -> Text:
    """Writes files whose tokens tell where they come from: counting up, file after file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        text = (np.arange(size) + 1000 * number) % 251
        (folder / f"{number:03d}.txt").write_bytes(text.astype(np.uint8).tobytes())
    return Text((f"{folder}/*.txt",))


def opened(dataset: Text, index: int = 0, count: int = 1, batch: int = 4, seed: int = 0) -> Stream:
    return dataset.open(seed, index, count, batch, 8)


def read(stream: Stream, batches: int, cursor: dict[str, int] | None = None) -> np.ndarray:
    rows = []
    cursor = cursor or stream.start()
    for _ in range(batches):
        tokens, cursor = stream.batch(cursor)
        rows.append(tokens)
    return np.concatenate(rows)


def starts(stream: Stream, windows: int) -> list[int]:
    return stream._starts(np.arange(windows)).tolist()


@settings(deadline=None)
@given(total=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50))
def test_an_order_visits_every_window_once(total, seed, epoch):
    order = shuffled(np.arange(total), total, seed, epoch)
    assert sorted(order.tolist()) == list(range(total))


def test_orders_differ_by_seed_and_epoch_and_look_shuffled():
    places = np.arange(1000)
    first, later, other = (shuffled(places, 1000, *which) for which in [(0, 0), (0, 1), (1, 0)])
    assert (first == later).mean() < 0.02 and (first == other).mean() < 0.02
    assert abs(np.corrcoef(places, first)[0, 1]) < 0.15
    assert (np.diff(first) == 1).mean() < 0.02


def test_a_batch_has_one_token_more_than_the_sequence_for_the_targets(tmp_path):
    tokens, _ = opened(book(tmp_path, 500)).batch({"windows": 0})
    assert tokens.shape == (4, 9) and tokens.dtype == np.int32
    assert (np.diff(tokens, axis=1) % 251 == 1).all()


def test_regions_that_share_a_corpus_read_different_windows(tmp_path):
    dataset = book(tmp_path, 2000)
    regions = [opened(dataset, index, 3) for index in range(3)]
    windows = [starts(region, region.windows) for region in regions]
    together = [start for part in windows for start in part]
    assert len(set(together)) == len(together) > 200


def test_a_region_of_another_batch_size_still_reads_its_own_part(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, 2000, dtype=np.uint8)
    (tmp_path / "noise.bin").write_bytes(noise.tobytes())
    dataset = Text((f"{tmp_path}/noise.bin",))
    left = read(opened(dataset, 0, 2, batch=4), 6)
    right = read(opened(dataset, 1, 2, batch=3), 8)
    assert len({row.tobytes() for row in (*left, *right)}) == 24 + 24


def test_a_restart_goes_on_where_the_cursor_says(tmp_path):
    dataset = book(tmp_path, 700)
    stream = opened(dataset)
    straight = read(stream, 60)  # Several epochs.
    _, cursor = stream.batch({"windows": 22 * 4})
    stored = json.loads(json.dumps(cursor))
    np.testing.assert_array_equal(read(opened(dataset), 37, stored), straight[23 * 4 :])


def test_an_epoch_reads_all_and_the_next_in_another_order_from_other_places(tmp_path):
    stream = opened(book(tmp_path, 1000))
    windows = stream.windows
    both = starts(stream, 2 * windows)
    first, second = both[:windows], both[windows:]
    assert len(set(first)) == len(set(second)) == windows
    assert first[0] % 8 != second[0] % 8
    assert [at // 8 for at in first] != [at // 8 for at in second]


def test_a_window_runs_over_the_end_of_a_file(tmp_path):
    corpus = data.Corpus([np.arange(5), np.arange(5, 7), np.arange(7, 20)])
    for start in range(10):
        assert corpus.window(start, 9).tolist() == list(range(start, start + 9))


def test_large_files_are_mapped_and_read_the_same(tmp_path, monkeypatch):
    dataset = book(tmp_path, 900)
    in_memory = read(opened(dataset), 5)
    monkeypatch.setattr(data, "MAPPED_FROM", 100)
    stream = opened(dataset)
    assert isinstance(stream.training.pieces[0], np.memmap)
    np.testing.assert_array_equal(read(stream, 5), in_memory)


def test_whole_files_are_held_out_whatever_folder_they_lie_in(tmp_path):
    here, there = (
        opened(book(tmp_path / place, *[200] * 60)) for place in ("here", "some/where/there")
    )
    assert here.apart.size == 3 * 200  # 5 % of 60 files.
    assert here.training.size == 57 * 200
    np.testing.assert_array_equal(here.heldout(2), there.heldout(2))
    first_tokens = {int(piece[0]) for piece in here.training.pieces}
    assert first_tokens.isdisjoint(int(piece[0]) for piece in here.apart.pieces)


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    stream = opened(book(tmp_path, 1000))
    assert (stream.training.size, stream.apart.size) == (950, 50)
    assert int(stream.apart.pieces[0][0]) == 950 % 251


def test_one_small_file_beside_a_large_one_is_not_all_that_is_held_out(tmp_path):
    stream = opened(book(tmp_path, 4000, 20))
    assert stream.apart.size == 200 + 1


def test_held_out_batches_are_the_same_for_every_region_and_seed(tmp_path):
    dataset = book(tmp_path, 3000)
    batches = opened(dataset).heldout(3)
    assert len(batches) == 3 and batches[0].shape == (4, 9)
    np.testing.assert_array_equal(batches, opened(dataset, 1, 2, seed=5).heldout(3))


def test_a_pattern_without_files_is_named(tmp_path):
    with pytest.raises(SpecError) as caught:
        Text((f"{tmp_path}/*.nothing",)).find()
    assert "*.nothing" in caught.value.message and caught.value.hint


def test_a_file_named_twice_is_read_once(tmp_path):
    book(tmp_path, 100, 100)
    assert len(Text((f"{tmp_path}/*.txt", f"{tmp_path}/000.txt")).find()) == 2


@pytest.mark.parametrize(
    "size, said", [(42, "too few for 4 regions.*at least 41 are"), (150, "held-out part has")]
)
def test_too_little_text_is_refused_with_the_numbers(tmp_path, size, said):
    with pytest.raises(SpecError, match=said):
        opened(book(tmp_path, size), 0, 4)


def test_an_unknown_tokenizer_is_located_inside_the_data():
    with pytest.raises(RegistryError) as caught:
        datasets.build({"kind": "text", "files": ["a"], "tokenizer": {"kind": "byte"}})
    assert caught.value.key == "tokenizer.kind" and "bytes" in (caught.value.hint or "")


def test_the_library_of_this_python_is_a_corpus():
    dataset = PythonSource()
    paths = dataset.find()
    assert sum(path.stat().st_size for path in paths) > 2_000_000
    assert not [path for path in paths if {"test", "site-packages"} & set(path.parts)]
    assert paths == dataset.find()
    stream = dataset.open(0, 0, 2, batch=2, sequence=32)
    assert 0.04 < stream.apart.size / (stream.apart.size + stream.training.size) < 0.06


def test_the_limit_holds():
    paths = PythonSource(limit=300_000).find()
    assert 200_000 < sum(path.stat().st_size for path in paths) <= 300_000


def test_only_regions_with_the_same_data_share_it():
    spec = RunSpec.model_validate(
        {
            "spec": 1,
            "name": "shares",
            "budget": {"tokens": 1_000_000},
            "regions": [
                {"name": "paris"},
                {"name": "tokyo", "data": {"kind": "text", "files": ["a.txt"]}},
                {"name": "iowa"},
            ],
        }
    )
    assert [place_of(spec, name) for name in ("paris", "tokyo", "iowa")] == [(0, 2), (0, 1), (1, 2)]
