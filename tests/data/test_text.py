"""Every region reads its own part of the text, and a restart neither repeats nor skips."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.core.lanes import Cursor, LanePosition
from diloco_cli.data import Stream, datasets, next_windows, shuffled
from diloco_cli.data import text as data
from diloco_cli.data.text import PythonSource, Text
from diloco_cli.errors import RegistryError, SpecError


def book(folder: Path, *sizes: int) -> Text:
    """Writes files whose tokens tell where they come from: counting up, file after file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        text = (np.arange(size) + 1000 * number) % 251
        (folder / f"{number:03d}.txt").write_bytes(text.astype(np.uint8).tobytes())
    return Text((f"{folder}/*.txt",))


def opened(dataset: Text, index: int = 0, count: int = 1, batch: int = 4, seed: int = 0) -> Stream:
    stream = replace(dataset, lanes=4).open(seed, batch, 8).part(index, count)
    # Shuffles depend on where the files lie, which is elsewhere in every test run.
    return replace(stream, order=replace(stream.order, seed=seed))


def read(stream: Stream, batches: int, cursor: Cursor | None = None) -> np.ndarray:
    rows = []
    cursor = cursor or stream.start()
    for _ in range(batches):
        tokens, cursor = stream.batch(cursor)
        rows.append(tokens)
    return np.concatenate(rows)


def starts(stream: Stream, windows: int) -> list[int]:
    lanes, positions, _ = next_windows(stream.start(), windows)
    return stream.order.starts(lanes, positions, stream.start().count).tolist()


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
    tokens, _ = opened(book(tmp_path, 500)).batch(opened(book(tmp_path, 500)).start())
    assert tokens.shape == (4, 9) and tokens.dtype == np.int32
    assert (np.diff(tokens, axis=1) % 251 == 1).all()


def test_regions_that_share_a_corpus_read_different_windows(tmp_path):
    dataset = book(tmp_path, 2000)
    regions = [opened(dataset, index, 3) for index in range(3)]
    windows = [starts(region, region.order.windows // 3) for region in regions]
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
    _, cursor = stream.batch(stream.start(22 * 4))
    stored = Cursor.of(json.loads(json.dumps(cursor.as_record())))
    np.testing.assert_array_equal(read(opened(dataset), 37, stored), straight[23 * 4 :])


def test_an_epoch_reads_all_and_the_next_in_another_order_from_other_places(tmp_path):
    stream = opened(book(tmp_path, 1000))
    windows = stream.order.windows
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


def test_held_out_files_are_listed_with_the_share_of_each(tmp_path):
    dataset = book(tmp_path, *[200] * 58, 100, 300)
    stream, listed = opened(dataset), dataset.held_out()
    assert listed.bytes == stream.apart.size and listed.of == 12_000
    held = {f"{tmp_path}/{file.path}" for file in listed.files}
    trained = [piece.tobytes() for piece in stream.training.pieces]
    assert held and not [path for path in held if Path(path).read_bytes() in trained]
    assert sum(file.share for file in listed.files) == pytest.approx(1)
    sizes = [file.bytes for file in listed.files]
    assert sizes == sorted(sizes, reverse=True) == [file.of for file in listed.files]


def test_where_files_are_cut_the_list_says_how_much_of_each(tmp_path):
    dataset = book(tmp_path, 4000, 1000)
    stream, listed = opened(dataset), dataset.held_out()
    assert [(file.path, file.bytes, file.of) for file in listed.files] == [
        ("000.txt", 200, 4000),
        ("001.txt", 50, 1000),
    ]
    assert [piece.size for piece in stream.apart.pieces] == [200, 50]
    assert str(listed) == "the end of 2 files, 250 B, 5.0% of the text: 000.txt 80%, 001.txt 20%"
    listed.write(tmp_path / "list.json")
    assert data.HeldoutText.read(tmp_path / "list.json") == listed
    assert data.HeldoutText.read(tmp_path / "none.json") is None


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
    "size, said", [(42, "too few for 4 lanes.*at least 41 are"), (150, "held-out part has")]
)
def test_too_little_text_is_refused_with_the_numbers(tmp_path, size, said):
    with pytest.raises(SpecError, match=said):
        opened(book(tmp_path, size))


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
    stream = dataset.open(0, batch=2, sequence=32)
    assert 0.04 < stream.apart.size / (stream.apart.size + stream.training.size) < 0.06


def test_the_limit_holds():
    paths = PythonSource(limit=300_000).find()
    assert 200_000 < sum(path.stat().st_size for path in paths) <= 300_000


LANES = st.dictionaries(st.integers(0, 30), st.integers(0, 60), min_size=1, max_size=12)


def at(lanes: dict[int, int]) -> Cursor:
    return Cursor("order", 31, {lane: LanePosition(7, n) for lane, n in lanes.items()})


@settings(deadline=None)
@given(lanes=LANES, count=st.integers(1, 90))
def test_the_next_windows_are_those_at_the_smallest_positions(lanes, count):
    ahead = [(n, lane) for lane, first in lanes.items() for n in range(first, first + count)]
    expected = sorted(ahead)[:count]
    numbers, positions, after = next_windows(at(lanes), count)
    assert list(zip(positions.tolist(), numbers.tolist(), strict=True)) == expected
    for lane, first in lanes.items():
        read = sum(where == lane for _, where in expected)
        assert after.lanes[lane] == (7, first + read)


@settings(deadline=None)
@given(lanes=LANES, batches=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_the_sequence_is_the_same_in_batches_of_any_size(lanes, batches):
    whole, cursor, parts = next_windows(at(lanes), sum(batches)), at(lanes), []
    for count in batches:
        numbers, positions, cursor = next_windows(cursor, count)
        parts += zip(numbers.tolist(), positions.tolist(), strict=True)
    assert parts == list(zip(whole[0].tolist(), whole[1].tolist(), strict=True))
    assert cursor == whole[2]


def test_lanes_divide_an_epoch_into_windows_that_nobody_else_reads(tmp_path):
    order = opened(book(tmp_path, 2000)).order
    lanes, positions, _ = next_windows(at(dict.fromkeys(range(31), 0)), order.windows // 31 * 31)
    found = order.starts(lanes, positions, 31).tolist()
    assert len(set(found)) == len(found) > 200


def test_the_lanes_of_a_whole_epoch_are_read_as_one_order(tmp_path):
    """One region with all lanes reads place after place, as one without lanes does."""
    stream = opened(book(tmp_path, 2000))
    many = Cursor("order", 31, {lane: LanePosition(1, 0) for lane in range(31)})
    np.testing.assert_array_equal(stream.batch(many)[0], stream.batch(stream.start())[0])


def test_an_order_is_named_by_settings_and_size_not_by_its_lanes(tmp_path):
    dataset = book(tmp_path, 2000)
    first = dataset.open(0, 4, 8).order.named
    assert first == dataset.open(0, 9, 8).order.named
    assert replace(dataset, lanes=9).open(0, 4, 8).order.named == replace(first, lanes=9)
    others = [
        dataset.open(1, 4, 8).order.named,
        dataset.open(0, 4, 10).order.named,
        replace(dataset, heldout=0.1).open(0, 4, 8).order.named,
    ]
    assert len({one.settings for one in (first, *others)}) == 4
    (tmp_path / "more.txt").write_bytes(b"x" * 80)
    grown = dataset.open(0, 4, 8).order
    assert grown.named.settings == first.settings and grown.named.digest != first.digest
    assert grown.seed != dataset.open(1, 4, 8).order.seed
