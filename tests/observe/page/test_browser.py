"""The page in a real Chromium: it has the points that the API has, and it goes on by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diloco_cli.spec.resolved import write_resolved
from tests import ROOT
from tests.observe.page.browser import Watched, started
from tests.observe.page.played_run import PlayedRun
from tests.observe.page.test_page import crowded_page

pytestmark = pytest.mark.live

LIMIT = 60_000
"""Milliseconds; what is waited for takes two seconds where nothing else runs."""

POINTS = "selector => (document.querySelector(selector)?.getAttribute('d') || '').match(/[ML]/g)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedRun]:
    # A lease outlasts the slowest machine: regions here speak only when a test lets them.
    changes = {"budget": {"tokens": 8_000}, "server": {"lease": 600.0}}
    with PlayedRun(tmp_path_factory.mktemp("page") / "run", **changes) as played:
        for number in range(4):
            played.round(number % 2, loss=5.0 / (1 + number))
        yield played


@pytest.fixture
def watched(browser: Any, run: PlayedRun) -> Iterator[Watched]:
    watched = Watched(browser, run.url)
    yield watched
    watched.context.close()


def until(watched: Watched, condition: str, argument: Any = None) -> None:
    watched.tab.wait_for_function(condition, arg=argument, timeout=LIMIT)


def test_the_charts_have_the_points_that_the_api_has(run, watched):
    tab = watched.tab
    until(watched, "n => document.querySelectorAll('circle.dot.thick').length === n", 4)
    history = tab.evaluate("fetch('/v1/history').then(answer => answer.json())")
    assert len(history["evaluations"]) == len(tab.evaluate(POINTS, "path.thick")) == 4
    assert len(history["regions"]) == 3
    # The curves grow while one looks: the page shows as many rows as the API, within seconds.
    until(
        watched,
        """async () => {
            const history = await (await fetch('/v1/history')).json();
            const known = history.regions.paris.tokens_per_second.filter(v => v !== null).length;
            const drawn = [...document.querySelectorAll('path.r1')].map(
                path => path.getAttribute('d').match(/[ML]/g).length);
            return known > 1 && drawn.includes(known);
        }""",
    )
    assert watched.errors == [] and watched.outside == []


def test_what_happens_is_on_the_page_without_a_reload(run, watched):
    watched.tab.evaluate("window.loadedOnce = true")
    assert "1.111" not in watched.tab.content()
    began = time.monotonic()
    run.round(0, loss=1.111)
    until(watched, "() => document.getElementById('live').innerText.includes('1.111')")
    print(f"on the page {time.monotonic() - began:.1f} s after the round was begun")
    assert watched.tab.evaluate("window.loadedOnce") is True
    assert watched.errors == [] and watched.outside == []


def test_a_chart_is_read_with_the_pointer_and_with_the_keys(run, watched):
    tab = watched.tab
    until(watched, "() => document.querySelectorAll('circle.dot.thick').length > 3")
    # Where the last evaluation stands, the reading is what the API says.
    place = tab.evaluate(
        """() => {
            const dots = [...document.querySelectorAll('#losses circle.dot.thick')];
            const box = dots.at(-1).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
    )
    tab.mouse.move(*place)
    [_, _, loss, _] = tab.evaluate(
        "fetch('/v1/history').then(a => a.json()).then(h => h.evaluations.at(-1))"
    )
    said = tab.inner_text("#losses .read")
    assert float(said.split("held-out ")[1].split(" ")[0]) == pytest.approx(loss, rel=0.02), said
    tab.mouse.move(0, 0)
    tab.focus("#losses .lines")
    for _ in range(100):  # Beyond the last evaluation there is nothing to read yet.
        tab.keyboard.press("ArrowLeft")
        if "held-out" in tab.inner_text("#losses .read"):
            break
    assert "held-out" in tab.inner_text("#losses .read")
    tab.keyboard.press("Escape")
    assert tab.inner_text("#losses .read") != said
    assert watched.errors == []


def test_a_round_is_chosen_and_events_are_filtered_without_a_reload(run, watched):
    tab = watched.tab
    tab.evaluate("window.loadedOnce = true")
    tab.focus("a.round")
    tab.keyboard.press("Enter")
    until(watched, "() => document.body.innerText.includes('Follow the newest round')")
    assert "round=" in tab.url
    tab.locator("#show-evaluations").uncheck()
    assert tab.locator("#events li.evaluations").first.is_hidden()
    run.round(0, loss=1.011)
    until(watched, "() => document.getElementById('losses').innerText.includes('1.011')")
    assert tab.locator("#events li.evaluations").first.is_hidden()
    assert "Follow the newest round" in tab.inner_text("#rounds")
    assert tab.evaluate("window.loadedOnce") is True and watched.errors == []


@pytest.mark.parametrize("width", [1440, 800, 390])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_people_who_see_or_point_differently_can_read_it(browser, run, width, colours):
    size = {"width": width, "height": 900}
    watched = Watched(browser, run.url, viewport=size, color_scheme=colours)
    assert watched.unfit() == [] and watched.overflow() <= 0
    assert watched.errors == [] and watched.outside == []
    watched.context.close()


@pytest.mark.parametrize("width", [1440, 390])
def test_two_hundred_regions_with_strange_names_fit_the_window(browser, tmp_path, width):
    file = tmp_path / "page.html"
    file.write_text(crowded_page().split("<script>")[0], encoding="utf-8")
    shown = Watched(browser, file.as_uri(), viewport={"width": width, "height": 900})
    assert shown.overflow() <= 0 and shown.unfit() == [] and shown.errors == []
    shown.context.close()


def test_a_report_of_the_run_while_it_goes_on_asks_nobody(browser, run, tmp_path):
    file = tmp_path / "report.html"
    write_resolved(run.settings.spec, run.folder)
    command = ("-m", "diloco_cli", "report", str(run.folder), "--out", str(file))
    subprocess.run((sys.executable, *command), check=True, cwd=ROOT)
    for width in (1440, 390):
        shown = Watched(browser, file.as_uri(), viewport={"width": width, "height": 900})
        assert "of 8000 tokens merged" in shown.tab.inner_text("h1")
        assert shown.unfit() == [] and shown.overflow() <= 0
        assert shown.errors == [] and shown.outside == []
        shown.context.close()


def test_the_page_reads_without_its_script(browser, run):
    plain = Watched(browser, run.url, java_script_enabled=False)
    text = plain.tab.inner_text("main")
    for words in ("8000 tokens", "Held-out loss", "Rounds", "tokyo", "Traffic", "Events"):
        assert words in text
    plain.context.close()


def test_the_page_outlives_the_server_and_goes_on_with_the_next(run, watched):
    watched.tab.evaluate("window.loadedOnce = true")
    run.kill()
    until(watched, "() => document.documentElement.classList.contains('gone')")
    assert "does not answer" in watched.tab.inner_text("#link")
    run.start()
    run.round(1, loss=1.075)
    until(watched, "() => document.getElementById('live').innerText.includes('1.075')")
    assert not watched.tab.inner_text("#link")
    assert watched.tab.evaluate("window.loadedOnce") is True
    refused = [error for error in watched.errors if "ERR_CONNECTION_REFUSED" not in error]
    assert all("ERR_" in error for error in refused), refused
    assert watched.outside == []
