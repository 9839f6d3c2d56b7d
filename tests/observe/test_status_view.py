"""The picture in a terminal: it fits, what is wrong comes first, and nothing is left over."""

from __future__ import annotations

import io
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from diloco_cli.observe.event_file import EventFile
from diloco_cli.observe.events import EventLog
from diloco_cli.observe.history import History, RoundRecord
from diloco_cli.observe.seen_run import SeenRun
from diloco_cli.observe.status_view import plain_line, shortened, status_view
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.observe.text_charts import lane, span_of, sparkline
from tests.observe.documents import make_status

LONG = "a-region-in-the-far-north-of-a-country-with-a-very-long-name-no1"
ARABIC, ROCKET = "منطقة-الشمال", "🚀-rocket-🧑‍🚀"
NAMES = ["left", LONG, ARABIC, ROCKET]


def region(name, **changes):
    well = {"alive": True, "training": True, "contributing": True, "step": 240, "loss": 2.4}
    return {"name": name, **well, "tokens_per_second": 3300.0, "share": 0.25, **changes}


def status_of(names=NAMES, second=0.0, **changes):
    standard = {
        "name": "quickstart",
        "state": "training",
        "seconds": second,
        "outer_steps": int(second),
        "tokens": {"budget": 4_000_000, "applied": 1_000_000},
        "loss": {"heldout": 5.0 - second / 20, "heldout_at": int(second)},
        "regions": [region(name, loss=5.0 - second / 20) for name in names],
    }
    return make_status(**{**standard, **changes})


def seen_run(names=NAMES, seconds=40) -> SeenRun:
    seen = SeenRun()
    for second in range(seconds):
        seen.look(status_of(names, float(second)))
    for turn in range(8):
        for fragment in range(4):
            called = turn * 5.0 + fragment
            record = RoundRecord(4 * turn + fragment, fragment, turn, called)
            record.closed, record.published = called + 0.5, called + 1.0
            record.adopted = {"left": called + 1.5}
            seen.rounds.append(record)
    return seen


def drawn(view, width):
    console = Console(file=io.StringIO(), width=width, height=30, highlight=False)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_rebuilt_run_says_what_went_with_its_server():
    def said(**rebuilt):
        status = status_of(rebuilt={"continues": ("aa", "bb"), **rebuilt})
        return drawn(status_view(status), 300)

    before = "continues run bb, whose server was lost or set back: "
    assert f"{before}nothing lost\n" in said(lost=0.0, awaited=())
    words = f"{before}34.9k merged tokens lost with it, without left, not back yet\n"
    assert words in said(lost=34_944.0, awaited=("left",))


def test_a_curve_has_the_letters_there_is_room_for_and_gaps_stay_gaps():
    assert sparkline([0.0, 1.0, 2.0, 3.0], 4) == "▁▃▆█"
    assert sparkline([None, 1.0, None, 3.0], 8) == "▁ █"
    assert sparkline([2.0, 2.0], 4) == "▅▅"
    assert sparkline([1.0], 4) == sparkline([], 4) == sparkline([None] * 9, 4) == ""
    assert sparkline([float(value) for value in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    falling = [100.0, *(2.0 - value / 100 for value in range(99))]
    assert sparkline(falling, 20)[1:] == "▁" * 19, "the first value takes all of the scale"
    assert len(set(sparkline(falling, 20, falls=True))) > 5


def test_a_lane_shows_each_moment_of_a_round():
    record = RoundRecord(1, 0, 3, 2.0)
    assert lane([record], 10.0, 10.0, 11) == "  ╶░░░░░░░░", "it gathers until now"
    record.published, record.adopted = 5.0, {"left": 7.0, "right": 5.0}
    assert lane([record], 10.0, 10.0, 11) == "  ╶░░◆ ○"
    assert lane([record], 100.0, 10.0, 11) == ""


def test_the_picture_of_rounds_covers_some_turns_whatever_they_take():
    def turns(each):
        return [RoundRecord(n, 0, n, n * each) for n in range(9)]

    assert span_of(turns(0.1)) == 5.0 and span_of(turns(60.0)) == 240.0
    assert span_of(turns(9000.0)) == 3600.0 and span_of([]) > 0


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("names", [["left"], NAMES, [f"region-{n}" for n in range(200)]])
def test_every_line_fits_the_window_and_all_of_it_fits_its_height(width, names):
    troubled = status_of(names, 39.0, trouble="the disk is full")
    picture = drawn(status_view(troubled, left=60.0, seen=seen_run(names), height=30), width)
    lines = picture.splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert lines[0] == "! the disk is full", "what is wrong comes first"
    if width >= 60:
        assert len(lines) < 30 and "rounds, last 20 s" in picture
        assert "0 v8" in picture and "3 v8" in picture and "◆" in picture
        assert "▂▁▁" in picture.split("region ")[0], "the curve of the loss"
    hidden = status_view(troubled, left=60.0, seen=seen_run(names), height=30, rounds=False)
    assert "rounds, last" not in drawn(hidden, width)


def test_of_many_regions_those_come_first_that_need_a_look():
    names = [f"region-{n}" for n in range(200)]
    regions = [region(name) for name in names]
    regions[150] |= {"alive": False, "contributing": False, "why": "silent for 9 s"}
    picture = drawn(status_view(status_of(regions=regions), height=30), 80)
    rows = picture.splitlines()
    first = next(index for index, row in enumerate(rows) if row.startswith("region "))
    assert rows[first + 1].startswith("region-150") and "away: silent for 9 s" in rows[first + 1]
    assert "more: " in rows[-1] and "contributing" in rows[-1]
    everything = drawn(status_view(status_of(regions=regions)), 80)
    assert all(name in everything for name in names), "without a window there is room for all"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_names_are_cut_in_the_middle_and_others_keep_their_columns(width):
    other = LONG.replace("no1", "no2")
    picture = drawn(status_view(status_of([*NAMES, other])), width)
    assert "a-region…" in picture and "me-no1" in picture and "me-no2" in picture
    rows = [line for line in picture.splitlines() if line.rstrip().endswith("contributing")]
    assert len({cell_len(row.rstrip()) for row in rows}) == 1 and len(rows) == 5
    assert f"\u2068{ARABIC}\u2069" in picture, "it turns nothing round but itself"
    assert cell_len(shortened("🚀" * 40, 16)) <= 16 and shortened("short", 16) == "short"


def test_a_plain_line_is_short_and_says_what_is_wrong_first():
    regions = [region("left"), region("right", contributing=False, training=False, why="x" * 300)]
    line = plain_line(status_of(regions=regions, trouble="the disk is full"), left=33)
    assert line.startswith("! the disk is full | ") and len(line) < 300
    well = plain_line(status_of(["left", "right"]), left=33)
    assert "2 of 2 regions contribute, 6600 tok/s" in well and len(well) < 120
    many = plain_line(status_of(regions=[region(f"r{n}", alive=False) for n in range(200)]))
    assert "r0 away" in many and "and 197 more" in many and len(many) < 400


def test_a_plain_line_cuts_a_reason_between_two_words():
    idle = region("right", contributing=False, training=False, why="waiting for tokens " * 9)
    line = plain_line(status_of(regions=[region("left"), idle]))
    assert line.endswith((" waiting …", " for …", " tokens …"))


def test_when_a_run_is_over_its_line_says_so_once():
    console = Console(file=io.StringIO(), width=80)
    with ProgressDisplay(console, clock=lambda: 0.0) as progress:
        for training in (True, False):
            over = [region("left", training=training), region("right", contributing=False)]
            progress.show(make_status(state="finished", regions=over))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("\n") == 1 and said.startswith("finished | ") and "tok/s" not in said
    lost = region("right", contributing=False, training=False, failed="its disk is full")
    line = plain_line(make_status(state="finished", regions=[region("left"), lost]))
    assert line.endswith(" | right failed: its disk is full")


def test_lines_of_a_log_do_not_come_with_every_change_of_a_region():
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    with ProgressDisplay(console, clock=lambda: now[0]) as progress:
        for number in range(100):
            now[0] += 0.1
            alive = [region(f"r{n}", alive=n < number) for n in range(100)]
            progress.show(status_of(regions=alive))
    assert len(console.file.getvalue().splitlines()) <= 6  # type: ignore[attr-defined]


class Window(Console):
    """A terminal whose window is pulled to another size."""

    def __init__(self) -> None:
        super().__init__(
            file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None
        )

    def take(self) -> str:
        assert isinstance(self.file, io.StringIO)
        text = self.file.getvalue()
        self.file.truncate(0)
        self.file.seek(0)
        return text


def test_a_window_of_another_size_is_wiped_before_the_picture_is_drawn_again():
    window = Window()
    with ProgressDisplay(window) as progress:
        progress.follow(None)
        progress.say("server at http://127.0.0.1:1")
        progress.show(status_of(second=1.0))
        progress.show(status_of(second=2.0))
        assert "\x1b[2J" not in window.take()
        window.width = 60
        progress.show(status_of(second=3.0))
        drawn_anew = window.take()
        wiped = drawn_anew.rindex("\x1b[2J")
        assert "server at" in drawn_anew[wiped:] and "held-out loss" in drawn_anew[wiped:]
        progress.show(status_of(second=4.0))
        assert "\x1b[2J" not in window.take()


def test_the_folder_tells_what_was_before_and_what_happened_since(tmp_path):
    history = History(1)
    for second in range(30):
        history.sample(second, status_of(["left"], float(second)))
    (tmp_path / "history.npz").write_bytes(history.dump())
    log = EventLog(tmp_path / "events.jsonl", "server")
    log.note("called", fragment=0, version=1)
    seen = SeenRun(tmp_path)
    assert len(seen.history.evaluations) == 30 and seen.rounds == []
    log.note("called", fragment=0, version=2)
    log.note("accepted", fragment=0, region="left", tokens=5, bytes=7)
    log.note("closed", fragment=0, version=2, members=["left"], weights=[1.0], why="all")
    log.note("published", fragment=0, version=3, bytes=9)
    log.note("adopted", region="left", fragment=0, version=3)
    EventFile(tmp_path / "events.jsonl", most=1 << 20).write(
        b'{"kind":"called","time":1,"seconds":1,"process":"server","cut":["fragment"]}\n'
    )
    seen.look(status_of(["left"], 31.0))
    (record,) = seen.rounds
    assert record.version == 2 and record.published is not None
    assert list(record.answered) == ["left"] and list(record.adopted) == ["left"]
    assert abs(record.called - 31.0) < 60, f"in seconds of the run, not {time.time():.0f}"


def test_a_folder_without_history_begins_now(tmp_path):
    (tmp_path / "history.npz").write_bytes(b"damaged")
    seen = SeenRun(tmp_path)
    seen.look(status_of(["left"], 5.0))
    assert seen.rounds == [] and len(seen.history.evaluations) == 1


def test_a_region_that_diverges_is_no_region_that_contributes():
    divergence = {"times": 7, "tokens": 448.0, "step": 9, "seconds": 3.0, "published": False}
    bad = region("b", contributing=False, divergence={**divergence, "why": "NaN"}, why="NaN")
    tokens = {"budget": 4000, "trained": 1000, "applied": 100, "refused": 900}
    status = make_status(state="training", tokens=tokens, regions=[region("a"), bad])
    line = plain_line(status)
    assert line.startswith("! all work of b is thrown away") and "1 of 2 regions contribute" in line
    assert "900 tokens thrown away (90% of all)" in line and "b diverging: NaN" in line
    lines = [line.split() for line in drawn(status_view(status), 120).splitlines()]
    assert lines[0][:5] == ["!", "all", "work", "of", "b"]
    assert [line[-2] for line in lines if line[:1] == ["b"]] == ["diverging:"]


def test_a_loss_that_has_exploded_is_no_state_in_which_a_region_contributes():
    status = make_status(state="training", regions=[region("a", loss=2e10, exploded=True)])
    assert "0 of 1 regions contribute" in plain_line(status)
