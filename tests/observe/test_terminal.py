"""People see the same facts on a wide terminal, a narrow one and in a log file."""

import io

import pytest
from rich.console import Console

from diloco_cli.observe.dashboard import page
from diloco_cli.observe.status import (
    LastKnown,
    LossStatus,
    RegionSummary,
    RunTokens,
    Summary,
    WireUse,
)
from diloco_cli.observe.terminal import (
    ProgressDisplay,
    display,
    last_known_view,
    plain_line,
    status_view,
    summary_view,
)
from tests.observe.documents import make_status

REGIONS = [
    {
        "name": "left",
        "alive": True,
        "training": True,
        "contributing": True,
        "step": 240,
        "loss": 2.4,
        "tokens_per_second": 3300.0,
        "share": 0.8,
    },
    {
        "name": "a-region-with-a-really-long-name",
        "alive": True,
        "contributing": True,
        "step": 60,
        "share": 0.2,
        "restarts": 2,
        "why": "waiting for version 7 of fragment 3",
    },
]
TOKENS = {"budget": 4_000_000, "applied": 1_000_000, "pending": 5_000}


def changed(**changes):
    standard = {
        "why": "1 of 2 regions needed are here",
        "state": "training",
        "outer_steps": 12,
        "tokens": TOKENS,
        "loss": {"heldout": 2.75, "train": 2.5},
        "wire": {"bits_per_parameter_up": 3.154, "bits_per_parameter_down": 6.2},
        "goodput": 0.97,
        "regions": REGIONS,
    }
    return make_status(**{**standard, **changes})


STATUS = changed()


def drawn(view, width=100, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_fits_the_window_and_says_why_a_region_waits(width):
    picture = drawn(status_view(STATUS, left=125), width)
    assert max(map(len, picture.splitlines())) <= width
    words = " ".join(picture.split())
    for fact in (
        "left",
        "240",
        "2.400",
        "3300",
        "80%",
        "2.750",
        "3.15 up",
        "2 min 5 s left",
        "1 of 2 regions",
    ):
        assert fact in words
    assert "waiting" in words and "fragment" in words


def test_text_from_a_region_is_never_read_as_markup():
    evil = {**REGIONS[0], "name": "[red]x[/red]", "why": "[bold]"}
    assert "[red]x[/red]" in drawn(status_view(changed(regions=[evil])))


def test_no_color_means_no_escape_codes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in drawn(status_view(STATUS), force_terminal=True)


def test_what_is_not_known_is_a_dash_and_no_zero():
    assert "held-out loss –" in drawn(status_view(make_status()))
    assert "held-out –" in plain_line(make_status())


def test_a_lonely_region_is_called_lonely():
    alone = [{**region, "contributing": n == 0} for n, region in enumerate(REGIONS)]
    told = plain_line(changed(regions=alone))
    assert "left is training alone" in told
    assert "training alone" not in plain_line(STATUS)
    drained = {**TOKENS, "applied": 4_000_001}
    assert "alone" not in plain_line(changed(regions=alone, tokens=drained))
    starting = [REGIONS[0], {"name": "right", "alive": True, "step": 0}]
    assert "training alone" not in plain_line(changed(regions=starting))


@pytest.mark.parametrize("state", ["waiting", "training"])
def test_trouble_is_shown_wherever_the_run_is_shown(state):
    troubled = changed(state=state, trouble="runs/x needs 67 free bytes and has 3.")
    alarm = "! runs/x needs 67 free bytes and has 3."
    assert alarm in drawn(status_view(troubled))
    assert alarm in plain_line(troubled)
    assert alarm in page(troubled)


def test_figures_are_not_wrapped_in_a_window_of_80_columns():
    tokens = {"budget": 4_000_000, "applied": 1_000_000, "pending": 598_000, "discarded": 99_000}
    lines = drawn(status_view(changed(tokens=tokens)), 80).splitlines()
    assert "held-out loss 2.750 · outer steps 12 · goodput 97%" in [each.rstrip() for each in lines]
    second = "bits/param 3.15 up, 6.20 down · 598.0k pending · 99.0k discarded"
    assert second in [each.rstrip() for each in lines]


def test_a_file_gets_whole_lines_and_no_padding():
    console = Console(file=io.StringIO(), width=40)
    display(status_view(STATUS), console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "waiting for version 7 of fragment 3 (2 restarts)\n" in told
    assert "25%, 1.00M of 4.00M tokens\n" in told and " \n" not in told


def test_a_region_that_failed_says_why_and_what_it_gave():
    failed = {**REGIONS[0], "failed": "no file matches 'x'", "alive": False}
    assert "failed: no file matches 'x'" in drawn(status_view(changed(regions=[failed])))
    fallen = RegionSummary(failed="no file matches 'x'", applied=81920.0)
    regions = {"right": fallen, "left": RegionSummary()}
    told = drawn(summary_view(Summary(state="finished", why="done", regions=regions)))
    assert "finished: done" in told
    assert "failed: no file matches 'x'; it gave 81.9k tokens" in told


def lines_of(progress):
    return progress.console.file.getvalue().splitlines()


def test_a_log_gets_a_line_every_ten_seconds_and_at_every_change_of_state():
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    with ProgressDisplay(console, clock=lambda: now[0]) as progress:
        for second in range(25):
            now[0] = float(second)
            progress.show(STATUS)
        assert len(lines_of(progress)) == 3
        progress.show(changed(state="finished"))
        assert len(lines_of(progress)) == 4
        assert lines_of(progress)[-1].startswith(
            "finished (1 of 2 regions needed are here) | 1.00M of 4.00M tokens (25%)"
        )


def test_the_time_left_comes_from_the_tokens_applied_lately():
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    with ProgressDisplay(console, clock=lambda: now[0]) as progress:
        progress.show(STATUS)
        now[0] = 10.0
        later = changed(tokens={**TOKENS, "applied": 2_000_000})
        progress.show(later)
        assert lines_of(progress)[-1].endswith("20 s left")


def test_the_summary_accounts_for_tokens_and_shows_the_fall_of_the_loss():
    tokens = {"trained": 0.0, "applied": 101.0, "pending": 0.0, "refused": 3.0, "discarded": 4.0}
    summary = Summary(
        state="finished",
        tokens=RunTokens(budget=100, **tokens),
        loss=LossStatus(heldout=2.1, first=5.5, best=2.0, train=1.9),
        outer_steps=40,
        wire=WireUse(
            bits_per_parameter_up=3.15,
            bits_per_parameter_down=None,
            bytes_up=3_000_000,
            bytes_down=0,
        ),
        wall_seconds=125.0,
    )
    told = drawn(summary_view(summary))
    for fact in ("finished", "5.500 at the start", "101 of 100", "3 refused", "3.0 MB", "2 min"):
        assert fact in told


def test_a_region_that_cannot_reach_its_server_is_named_with_the_time():
    known = LastKnown(
        state="training",
        why="last heard of",
        outer_steps=3,
        tokens={"applied": 4096},
        loss=LossStatus(),
        wire={},
        regions={},
        away={"paris": 1.7e9},
    )
    told = drawn(last_known_view(known), 120)
    assert "training: last heard of" in told and "4096 of –" in told
    assert "paris" in told and "out of reach since 2023-11-1" in told
