"""The page is whole without a network, shows what the status says and runs no stranger's text."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

from diloco_cli.observe.history import History
from diloco_cli.observe.page import POLICY, View, page
from diloco_cli.observe.page.curves import traffic_chart
from tests.observe.documents import make_status

STATUS = make_status(
    state="training",
    outer_steps=12,
    tokens={"applied": 400, "pending": 50},
    loss={"heldout": 2.75},
    wire={"bits_per_parameter_up": 3.154},
    regions=[
        {"name": "left", "alive": True, "training": True, "contributing": True, "share": 0.75},
        {"name": "right", "alive": False, "why": "<script>alert(1)</script>"},
    ],
)

VOID = {"meta", "br", "input"}


class Outline(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.scripts, self.outside, self.text = [], 0, [], []

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.outside += [v for k, v in attrs if k in ("src", "href") and "//" in (v or "")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(status):
    parser = Outline()
    parser.feed(page(status))
    assert parser.open == []
    return parser


def test_the_page_shows_the_figures_of_the_status():
    text = " ".join(outline(STATUS).text)
    for fact in ("quickstart: training", "400 of 1000 tokens", "2.750", "3.15", "75%", "away"):
        assert fact in text


def test_text_from_regions_is_escaped_and_nothing_comes_from_outside():
    parsed = outline(STATUS)
    assert parsed.scripts == 1 and parsed.outside == []
    assert "<script>alert" not in page(STATUS)


def test_a_run_no_region_has_joined_yet_has_a_page_too():
    waiting = make_status(regions=[{"name": "left", "why": "not joined yet"}])
    assert "away not joined yet" in " ".join("".join(outline(waiting).text).split())


def with_curves(rounds=12):
    history = History(2)
    for second in range(60):
        tokens, step = 10 * second, second // 5
        history.sample(
            second,
            make_status(
                state="training",
                tokens={"applied": tokens},
                loss={"heldout": 5.0 / (1 + step), "heldout_at": step},
                regions=[{"name": "left", "alive": True, "loss": 3.0, "tokens_per_second": 9.0}],
            ),
        )
    for number in range(rounds):
        at, fragment, version = 3.0 * number, number % 2, number // 2
        about = {"fragment": fragment, "version": version}
        history.note("called", about, at, at)
        history.note("accepted", {**about, "region": "left", "tokens": 64.0}, at + 1, at)
        history.note("closed", {**about, "members": ["left"], "why": "all here"}, at + 2, at)
        history.note("published", {**about, "bytes": 2_000}, at + 2.5, at)
    history.note("joined", {"region": "left", "epoch": 1}, 0.0, 1_794_000_000.0)
    return history


def test_the_curves_have_the_points_that_the_history_has():
    history = with_curves()
    document = {"now": 60.0, **history.document()}
    shown = page(STATUS, document, list(history.events))
    [heldout] = re.findall(r"class='line thick' data-name='held-out' d='([^']+)'", shown)
    assert len(re.findall("[ML]", heldout)) == len(document["evaluations"]) == 12
    [speed, *_] = re.findall(r"class='line r0' data-name='left' d='([^']+)'", shown)
    assert len(re.findall("[ML]", speed)) == 60
    assert shown.count("<a class='round") == 8, "four turns of two fragments"
    assert "left answers<small>64 tokens of work" in shown and "version 5 → 6" in shown
    chosen = page(STATUS, document, view=View(round=3))
    assert "version 1 → 2" in chosen and "Follow the newest round" in chosen
    assert "joined" in shown and len(shown) < 150_000 and "EMA" not in shown
    by_time = page(STATUS, document, view=View(by_time=True))
    assert by_time.count("aria-current=true") == 1 and "?x=time' aria-current" in by_time


def test_the_average_of_the_weights_has_a_line_of_its_own():
    history = History(1)
    for second in range(9):
        losses = {"heldout": 3.0, "heldout_at": second, "ema": 2.5, "ema_at": second}
        history.sample(second, make_status(state="training", loss=losses))
    newest = {"heldout": 3.0, "heldout_at": 8, "ema": 2.5, "ema_at": 9}
    status = make_status(state="training", loss=newest)
    shown = page(status, {"now": 9.0, **history.document()})
    [average] = re.findall(r"class='line dash' data-name='EMA' d='([^']+)'", shown)
    assert len(re.findall("[ML]", average)) == 9
    assert "of the average 2.500 at outer step 9" in shown and "Dashed: the average" in shown


def test_labels_of_small_charts_are_few_and_never_say_the_same_twice():
    history = History(1)
    for second in range(121):
        history.sample(second, make_status(state="training", seconds=float(second)))
    document = {"now": 120.0, **history.document()}
    drawn = traffic_chart(document, label="Traffic")
    words = re.findall(r"<text[^>]*>([^<]+)</text>", drawn)
    assert words.count("0 B") == 1, "nothing was moved"
    assert [each for each in words if "min" in each] == ["1 min", "2 min"]


def test_what_the_weights_wrote_is_shown_escaped_and_only_the_last_few_are_kept():
    history, again = History(1), History(1)
    for step in (*range(20), 5):
        text = f"<script>alert({step})</script>\u202e"
        said = {"outer_steps": step, "tokens": 10.0 * step, "prompt": "<b>", "text": text}
        history.note("sampled", {"region": "left", **said}, float(step), 1e9 + step)
    again.load(history.dump())
    document = {"now": 1.0, **again.document()}
    assert [each["outer_step"] for each in document["samples"]] == list(range(12, 20))
    shown = page(STATUS, document, list(history.events))
    assert "<script>alert" not in shown and shown.count("&lt;script&gt;alert(19)") == 1
    assert "after 190 tokens, at outer step 19" in shown and "<summary>7 earlier" in shown
    assert "id='samples'></section>" in page(STATUS), "no empty panel"


STRANGE = ["x" * 64, "מחוז", "🦀" * 5, "<b>&'\"", "\u202edne", *(f"region-{n}" for n in range(195))]


def crowded_page() -> str:
    """200 regions with strange names, 24 fragments, a clock that jumped, and many alarms."""
    regions = [
        {"name": name, "alive": n != 7, "training": True, "contributing": True, "step": 1}
        for n, name in enumerate(STRANGE)
    ]
    status = make_status(state="training", name="🦀 <i>run</i> מ", quorum=100, regions=regions)
    history = History(24)
    for second in (*range(30), 5, 4e9, math.inf, -3):
        history.sample(second, status)
    for number in range(17 * 24 - 1):
        about = {"fragment": number % 24, "version": number // 24}
        at, lost = float(number), STRANGE[number % 200]
        members = [name for name in STRANGE if name != lost]
        history.note("called", about, at, at)
        for name in members:
            history.note("accepted", {**about, "region": name, "tokens": 9.0, "bytes": 9}, at, at)
        closed = {**about, "members": members, "weights": [1.0] * 199, "why": "grace is over"}
        history.note("closed", closed, at + 1, at)
        history.note("published", {**about, "bytes": 2_000}, at + 1.5, at)
    for number, wall in enumerate((1.79e9, -1e30, math.nan, 1e300) * 100):
        history.note("lapsed", {"region": STRANGE[number % 200], "why": "<img src=x>"}, 1.0, wall)
    document = {"now": 450.0, **history.document(points=300)}
    assert len(json.dumps(document)) < 2_000_000
    return page(status, document, list(history.events)[::-1][:100])


def test_the_page_stays_right_with_strange_names_and_many_regions():
    parser, text = Outline(), crowded_page()
    parser.feed(text)
    assert parser.open == [] and len(text.encode()) < 150_000
    assert not any(raw in text for raw in ("<b>&'", "<i>run", "<img"))
    assert all(name in "".join(parser.text) for name in STRANGE)
    assert "199 of 199 regions" in text and "is not in it" in text


def test_the_policy_allows_just_this_style_and_this_script():
    shown = page(STATUS)
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        text = shown.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in POLICY
    assert "style=" not in shown.split("</style>")[1] and " onclick" not in shown


def test_a_region_whose_work_is_thrown_away_is_an_alarm_and_does_not_count():
    at = {"alive": True, "training": True, "contributing": True, "step": 9}
    about = {"times": 7, "tokens": 448.0, "step": 1, "seconds": 3.0, "published": False}
    regions = [
        {"name": "good", **at},
        {"name": "bad", **at, "contributing": False, "divergence": {**about, "why": "NaN"}},
        {"name": "large", **at, "exploded": True, "loss": 2e10},
    ]
    text = page(make_status(state="training", regions=regions))
    alarms = text.partition("<div id='alarms'>")[2].partition("<div id=")[0]
    assert "▲ all work of bad is thrown away" in alarms and "loss of large has exploded" in alarms
    assert "1 of 3 regions contributing" in text
    assert text.count("<tr class='bad'>") == text.count("▲ diverging") == 2
