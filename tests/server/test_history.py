"""The recorder looks on: a missing file is silent, a damaged one is said, the curves go on."""

import asyncio
import logging
from typing import Any

from diloco_cli.server import history
from diloco_cli.server.history import NAME, HistoryRecorder
from tests.server.harness import Bench, close_server, in_a_loop


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@in_a_loop
async def test_curves_and_rounds_are_kept_and_go_on_after_a_restart(tmp_path, caplog):
    passed_on = []
    recorder = HistoryRecorder(tmp_path, 2, lambda kind, **fields: passed_on.append(kind))
    assert not warnings(caplog), "a run that begins has no curves yet"
    bench = Bench(tmp_path / "run")
    await bench.join("paris", "tokyo")
    await bench.round(0, "paris", "tokyo")
    for kind, fields in bench.noted:
        recorder.note(kind, **fields)
    assert passed_on == [kind for kind, _ in bench.noted]
    recorder.sample(bench.server)
    await recorder.keep()
    [told] = recorder.history.rounds.after(0)
    assert told["members"] == ["paris", "tokyo"] and told["published"] is not None

    again = HistoryRecorder(tmp_path, 2, lambda kind, **fields: None)
    assert again.history.document() == recorder.history.document()
    assert again.history.document()["rounds"] and list(again.history.events)
    assert list(again.history.events) == list(recorder.history.events)
    assert not warnings(caplog)


def test_a_damaged_file_is_said_and_costs_only_the_curves(tmp_path, caplog):
    (tmp_path / NAME).write_bytes(b"rubbish")
    recorder = HistoryRecorder(tmp_path, 2, lambda kind, **fields: None)
    [said] = warnings(caplog)
    assert "history.npz" in said and "begin anew" in said
    assert recorder.history.document()["run"]["at"] == []


def test_a_disk_that_takes_nothing_costs_the_picture_and_no_more(tmp_path, caplog):
    recorder = HistoryRecorder(tmp_path / "gone", 2, lambda kind, **fields: None)
    asyncio.run(recorder.keep())
    assert any("not kept" in each for each in warnings(caplog))


@in_a_loop
async def test_a_sample_that_fails_is_said_once_and_the_next_ones_are_taken(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(history, "SAMPLE_SECONDS", 0.0)
    bench = Bench(tmp_path / "run")
    await bench.join()
    await bench.round(0)
    recorder = HistoryRecorder(tmp_path, 2, lambda kind, **fields: None)
    for kind, fields in bench.noted:
        recorder.note(kind, **fields)
    rounds: list[Any] = recorder.history.rounds.all
    for record in rounds:
        record.version = "one"  # As a file may say that another release wrote.
    sampling = asyncio.create_task(recorder.run(bench.server))
    rows = recorder.history.run.rows
    async with asyncio.timeout(20):
        for seconds in range(1, 4):
            bench.clock.now += seconds
            for name in bench.regions:
                await bench.beat(name)
            while recorder.history.run.rows == rows and not sampling.done():
                await asyncio.sleep(0)
            rows = recorder.history.run.rows
            await bench.round(0)
    assert not sampling.done()
    [said] = warnings(caplog)
    assert "TypeError" in said and "history.py" in said, said
    recorder.note("called", fragment="none")
    assert len(warnings(caplog)) == 2, "nor does an event that cannot be drawn hold up the server"
    sampling.cancel()
    await close_server(bench.server)


@in_a_loop
async def test_curves_that_cannot_be_written_do_not_keep_the_server_from_ending(tmp_path, caplog):
    recorder = HistoryRecorder(tmp_path, 2, lambda kind, **fields: None)
    events: Any = recorder.history.events
    events.append((0.0, "joined", "paris", {1, 2}))
    await recorder.keep()
    [said] = warnings(caplog)
    assert "TypeError" in said
