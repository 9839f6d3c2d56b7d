"""People see the same facts on a wide terminal, a narrow one and in a log file."""

import io

import pytest
from rich.console import Console

from diloco_cli.observe.page import page
from diloco_cli.observe.status import (
    Goodputs,
    LastKnown,
    LossStatus,
    RegionSummary,
    RunTokens,
    Summary,
    WireUse,
)
from diloco_cli.observe.status_view import plain_line, status_view
from diloco_cli.observe.terminal import (
    ProgressDisplay,
    display,
    last_known_view,
    summary_view,
)
from tests.observe.documents import FATES, make_status

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
        "loss": {"heldout": 2.75, "train": 2.5, "heldout_at": 8},
        "wire": {"bits_per_parameter_up": 3.154, "bits_per_parameter_down": 6.2},
        "goodput": 0.97,
        "goodputs": {"time": 0.07, "tokens": 0.09, "participation": 0.5},
        "regions": REGIONS,
    }
    return make_status(**{**standard, **changes})


STATUS = changed()


def drawn(view, width=100, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_who_counts_and_who_does_not_is_said():
    status = make_status(
        regions=[
            {"name": "left", "alive": True, "training": True, "step": 5},
            {"name": "oslo", "alive": True, "listed": False, "step": 5},
            {"name": "right", "member": False, "why": "not joined yet"},
            {"name": "turku", "member": False, "retired": "removed by eve: sold", "why": "sold"},
        ],
        tokens={"discarded": 96.0, "given_up": 64.0},
    )
    picture, who = drawn(status_view(status)), "2 members (1 not listed), 1 expected, 1 retired"
    assert who in picture and who in page(status) and who in plain_line(status)
    assert "idle (not listed)" in picture and "expected: not joined yet" in picture
    assert "retired: sold" in picture and "turku" not in plain_line(status)
    assert "96 discarded · of these 64 given up by retired regions" in picture


@pytest.mark.parametrize("width", [40, 60, 80, 200])
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


@pytest.mark.parametrize("width", [60, 120])
def test_a_region_that_has_not_followed_an_amendment_yet_is_marked(width):
    slow, quick = {**REGIONS[0], "terms": 2}, {**REGIONS[1], "terms": 3}
    words = " ".join(drawn(status_view(changed(regions=[slow, quick], terms=3)), width).split())
    assert words.count("under terms") == 1 and "under terms 2 of 3" in words
    assert "under terms" not in drawn(status_view(changed(regions=[slow], terms=2)), width)


@pytest.mark.parametrize("width", [60, 120])
def test_what_each_device_gives_is_said_where_it_is_known(width):
    cluster = {
        **REGIONS[0],
        "devices": 8,
        "tflops": 395.46,
        "mfu": 0.3999,
        "device_memory": 61_000_000_000,
        "blocked": 0.0021,
    }
    words = " ".join(drawn(status_view(changed(regions=[cluster])), width).split())
    assert "left: 8 devices, 412 tok/s each, 395 TFLOP/s each, MFU 40%, 61.0 GB in use" in words
    assert "in use, 0.2% of the time held up by the exchange" in words
    unknown = {**REGIONS[0], "devices": 2, "tflops": 0.0512}
    words = " ".join(drawn(status_view(changed(regions=[unknown])), width).split())
    assert "left: 2 devices, 1650 tok/s each, 0.0512 TFLOP/s each" in words
    assert "MFU" not in words and "in use" not in words
    laptop = {**REGIONS[0], "devices": 1, "tflops": 0.05}
    assert "TFLOP" not in drawn(status_view(changed(regions=[laptop])), width)


@pytest.mark.parametrize("width", [60, 120])
def test_a_host_that_holds_its_region_up_is_named(width):
    times = {0: 0.010, 1: 0.011, 2: 0.023}
    hosts = [
        {"host": host, "work_seconds": seconds, "step_seconds": 2.0 * seconds / 0.023}
        for host, seconds in times.items()
    ]
    cluster = {**REGIONS[0], "devices": 24, "hosts": hosts}
    words = " ".join(drawn(status_view(changed(regions=[cluster])), width).split())
    assert "3 hosts, 24 devices" in words
    assert "host 2 of left holds its region up: it takes 2.1 times as long as the others" in words
    assert "(a step takes 2 s, and 0.957 s without it)" in words
    even = {**cluster, "hosts": hosts[:2]}
    assert "holds its region up" not in drawn(status_view(changed(regions=[even])), width)


def test_text_from_a_region_is_never_read_as_markup():
    evil = {**REGIONS[0], "name": "[red]x[/red]", "why": "[bold]"}
    assert "[red]x[/red]" in drawn(status_view(changed(regions=[evil])))


def test_a_roomy_window_shows_what_each_line_carries():
    linked = [{**REGIONS[0], "link_up": 8.6e6, "link_down": 31.14e6}, {**REGIONS[1]}]
    roomy = drawn(status_view(changed(regions=linked)), 100)
    assert "MB/s up/down" in roomy and "8.6/31.1" in roomy and "–/–" in roomy
    narrow = drawn(status_view(changed(regions=linked)), 99)
    assert "MB/s" not in narrow and "8.6/31.1" not in narrow


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
    assert f"role='alert'><p>▲ {alarm.removeprefix('! ')}" in page(troubled)


def test_figures_are_not_wrapped_in_a_window_of_80_columns():
    tokens = {"budget": 4_000_000, "applied": 1_000_000, "pending": 598_000, "discarded": 99_000}
    lines = drawn(status_view(changed(tokens=tokens)), 80).splitlines()
    told = [each.rstrip() for each in lines]
    assert "held-out loss 2.750 at outer step 8 of 12" in told
    assert "goodput: time 7%, tokens 9%, participation 50% · kept 97%" in told
    assert "bits/param 3.15 up, 6.20 down · 598.0k pending · 99.0k discarded" in told


def test_the_average_of_the_weights_stands_with_its_own_outer_step():
    """It is often newer than the plain loss beside it, for example after a resume."""
    losses = {"heldout": 5.698, "heldout_at": 0, "ema": 2.9, "ema_at": 5}
    shown = changed(loss=losses, outer_steps=14)
    told = drawn(status_view(shown), 80).splitlines()
    expected = "held-out loss 5.698 at outer step 0 of 14 · of the average 2.900 at outer step 5"
    assert expected in [each.rstrip() for each in told]
    assert "at outer step 0; of the average 2.900 at outer step 5" in page(shown)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_share_of_the_time_leads_and_what_is_merely_kept_is_not_called_goodput(width):
    """A run that stood still for most of the time must not read as if all were well."""
    figures = {"goodput": 1.0, "goodputs": Goodputs(time=0.07, tokens=0.07, participation=0.5)}
    ended = Summary(state="finished", **figures)  # type: ignore[arg-type]
    for words in (
        " ".join(drawn(status_view(changed(goodput=1.0)), width).split()),
        " ".join(drawn(summary_view(ended), width).split()),
    ):
        shares = [words.index(word) for word in ("time 7%", "participation", "kept")]
        assert shares == sorted(shares)
        assert "goodput 100%" not in words and "100%" in words[shares[-1] :]
    shown = page(changed(goodput=1.0))
    assert shown.index("went into useful steps") < shown.index("of it kept")
    assert "<h2>Goodput</h2><b class='big'>100%" not in shown


LOSSES = [
    (LossStatus(), "not evaluated yet"),
    (
        LossStatus(
            **{"heldout": 5.7, "first": 5.7, "heldout_at": 0, "first_at": 0},
            **{"ema": 5.5, "ema_at": 4},
        ),
        "5.700 at outer step 0 of 96, the only evaluation; of the average 5.500 at outer step 4",
    ),
    (
        LossStatus(heldout=5.743, first=5.743, best=5.743, heldout_at=0, first_at=0, best_at=0),
        "5.743 at outer step 0 of 96, the only evaluation",
    ),
    (
        LossStatus(heldout=1.632, first=5.743, best=1.6, heldout_at=92, first_at=0, best_at=88),
        "5.743 at outer step 0, 1.632 at 92 of 96, 1.600 at best",
    ),
    (
        LossStatus(heldout=1.632, first=5.743, best=1.632, heldout_at=92, first_at=0, best_at=92),
        "5.743 at outer step 0, 1.632 at 92 of 96, the best",
    ),
    (
        LossStatus(heldout=6.1, first=5.743, best=5.743, heldout_at=92, first_at=0, best_at=0),
        "5.743 at outer step 0, the best, 6.100 at 92 of 96",
    ),
]


@pytest.mark.parametrize("losses, said", LOSSES)
def test_each_evaluation_is_printed_once_with_the_step_it_belongs_to(losses, said):
    told = drawn(summary_view(Summary(state="stopped", loss=losses, outer_steps=96)), 200)
    assert f"held-out loss  {said}" in told


def test_the_name_of_a_held_out_file_is_never_cut_short():
    path = "a/rather/long/path/to/some/text/file.txt"
    told = drawn(summary_view(Summary(state="stopped"), beside=[("held-out text", path)]), 40)
    assert path in "".join(word for word in told.split() if "held-out" not in word)


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
        assert " | 20 s left | " in lines_of(progress)[-1]


def test_the_summary_accounts_for_tokens_and_shows_the_fall_of_the_loss():
    tokens = dict.fromkeys(FATES, 0.0) | {"applied": 101.0, "refused": 3.0, "discarded": 4.0}
    summary = Summary(
        state="finished",
        tokens=RunTokens(budget=100, **tokens),
        loss=LossStatus(heldout=2.1, first=5.5, best=2.0, train=1.9, heldout_at=38, first_at=0),
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
    for fact in ("finished", "5.500 at outer step 0", "101 of 100", "3 refused", "3.0 MB", "2 min"):
        assert fact in told


def test_the_summary_says_what_was_read_twice_or_left_out_where_anything_was():
    tokens = RunTokens(budget=100, **dict.fromkeys(FATES, 0.0))
    assert "read twice" not in drawn(summary_view(Summary(state="finished", tokens=tokens)))
    tokens = tokens.model_copy(update={"repeated": 640.0, "unread": 64.0})
    told = drawn(summary_view(Summary(state="finished", tokens=tokens)), 120)
    assert "640 tokens read twice, 64 left out" in told


def test_the_summary_says_why_the_budget_was_not_kept():
    summary = Summary(state="finished", overshoot="102 % of the budget: iowa was away")
    assert "102 % of the budget: iowa was away" in drawn(summary_view(summary))
    assert "budget" not in drawn(summary_view(Summary(state="finished")))


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
