"""A region's lines: few, bounded, whole, and never a reason to stop."""

from __future__ import annotations

import json
import math

from diloco_cli.observe.metrics_file import (
    COLUMNS,
    FILE,
    LONGEST_GAP,
    MetricsFile,
    MetricsReader,
    Traffic,
    metrics_folders,
    read_metrics,
)

DAY = 86_400.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_bytes().splitlines()]


def test_a_line_has_every_column_and_what_is_not_a_number_is_null(tmp_path):
    MetricsFile(tmp_path).note(3, 1.0, {"tokens": 12345678.5, "loss": 2.1234567, "mfu": math.nan})
    (line,) = lines(tmp_path)
    assert list(line) == list(COLUMNS)
    assert (line["step"], line["tokens"], line["loss"], line["mfu"]) == (
        3,
        12345678.5,
        2.12346,
        None,
    )


def test_lines_come_at_most_once_a_second_and_the_last_one_always(tmp_path):
    steady = Clock()
    file = MetricsFile(tmp_path, steady=steady)
    for step in range(1, 101):
        steady.now += 0.1
        file.note(step, steady.now, {"loss": 1.0})
    assert len(lines(tmp_path)) == 10
    file.note(100, steady.now, {"loss": 1.0}, last=True)
    assert lines(tmp_path)[-1]["step"] == 100
    file.note(100, steady.now, {"loss": 1.0}, last=True)
    assert len(lines(tmp_path)) == 11, "a step is written once"


def test_gaps_grow_with_the_run_so_that_months_stay_on_disk(tmp_path):
    steady, step = Clock(), 0
    file = MetricsFile(tmp_path, most=1 << 19, steady=steady)
    while steady.now < 3 * DAY:
        steady.now, step = steady.now + 2.0, step + 1
        file.note(step, steady.now, {"loss": 1.0, "tokens": 1e9, "trained": 1e9})
    kept = [step for step in read_metrics(tmp_path)["step"] if step is not None]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * (1 << 19) + 4096
    assert kept[-1] > step - LONGEST_GAP and kept == sorted(set(kept))
    gaps = [after - before for before, after in zip(kept[-9:], kept[-8:], strict=False)]
    assert min(gaps) >= 12, "a ten-thousandth of three days, in steps of two seconds"


def test_a_deleted_file_begins_anew_and_a_deleted_folder_is_no_trouble(tmp_path):
    folder = tmp_path / "left"
    folder.mkdir()
    file = MetricsFile(folder, steady=(steady := Clock()))
    for step in (1, 2, 3):
        steady.now += 5
        file.note(step, 1.0, {})
        if step == 2:
            (folder / FILE).unlink()
    assert [line["step"] for line in lines(folder)] == [3]
    (folder / FILE).unlink()
    folder.rmdir()
    steady.now += 5
    file.note(4, 1.0, {})
    assert read_metrics(folder)["step"] == []


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path):
    path = tmp_path / FILE
    path.symlink_to("/dev/full")
    file = MetricsFile(tmp_path, steady=(steady := Clock()))
    file.note(1, 1.0, {})
    path.unlink()
    steady.now += 5
    file.note(2, 1.0, {})
    assert [line["step"] for line in lines(tmp_path)] == [2]


def test_a_clock_that_jumps_back_changes_no_order_and_no_pace(tmp_path):
    wall, steady = Clock(), Clock()
    file = MetricsFile(tmp_path, clock=wall, steady=steady)
    for step, time in ((1, 5000.0), (2, 10.0), (3, 9e9)):
        wall.now, steady.now = time, steady.now + 1.5
        file.note(step, 1.0, {})
    found = read_metrics(tmp_path)
    assert found["step"] == [1, 2, 3] and found["time"] == [5000.0, 10.0, 9e9]


def test_traffic_goes_on_where_the_agent_before_had_counted_to(tmp_path):
    first = MetricsFile(tmp_path)
    first.traffic += Traffic(100, 2000)
    first.note(1, 1.0, {})
    second = MetricsFile(tmp_path)
    second.traffic += Traffic(1, 1)
    second.note(2, 1.0, {})
    assert read_metrics(tmp_path)["bytes_down"] == [2000, 2001]


def test_half_a_line_and_nonsense_are_left_out(tmp_path):
    MetricsFile(tmp_path).note(1, 1.0, {})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'[]\n{"step": true}\n{"step": 2, "loss": "low"}\n{"step": 3')
    found = read_metrics(tmp_path)
    assert found["step"] == [1, 2] and found["loss"] == [None, None]


def test_a_reader_gets_each_line_once_while_more_are_written(tmp_path):
    reader, file = MetricsReader(tmp_path), MetricsFile(tmp_path, steady=(steady := Clock()))
    assert reader.more() == []
    seen = []
    for step in (1, 2, 3):
        steady.now += 5
        file.note(step, 1.0, {})
        seen.append([row["step"] for row in reader.more()])
    assert seen == [[1], [2], [3]] and reader.more() == []


def test_the_regions_of_a_run_are_found_by_their_files(tmp_path):
    for name in ("paris", "東京", "x" * 64):
        folder = tmp_path / "regions" / name
        folder.mkdir(parents=True)
        MetricsFile(folder).note(1, 1.0, {})
    (tmp_path / "regions" / "silent").mkdir()
    assert {name for name, _ in metrics_folders(tmp_path)} == {"paris", "東京", "x" * 64}
