"""A report says what the run's files say, needs nobody, and survives what is missing."""

import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from diloco_cli import read_run
from diloco_cli.cli.app import app
from diloco_cli.errors import SpecError
from diloco_cli.observe.events import EventLog, read_events
from diloco_cli.observe.history import History
from diloco_cli.observe.page.log_digest import digest
from diloco_cli.observe.page.report import Environment, Sample, report
from diloco_cli.observe.run_record import summary_of
from tests import ROOT
from tests.observe.documents import make_status


def a_run(folder, name="trial", *, seconds=40, summary=True, ema=False):
    folder.mkdir()
    (folder / "spec.resolved.yaml").write_text(f"name: {name}\nmodel: '<b>'\n")
    history = History(1)
    status = make_status()
    for second in range(seconds):
        status = make_status(
            name=name,
            state="finished",
            seconds=float(second),
            outer_steps=second,
            tokens={"applied": 10 * second, "trained": 10 * second},
            loss={
                **{"heldout": 4.0 - second / 20, "heldout_at": second},
                **({"ema": 3.0, "ema_at": second} if ema else {}),
            },
            regions=[{"name": "left", "alive": True, "loss": 3.0, "tokens_per_second": 9.0}],
        )
        history.sample(second, status)
    said = {"outer_steps": 3, "tokens": 30.0, "prompt": "once <upon>", "text": " a <time>"}
    history.note("sampled", said, 3.0, 3.0)
    (folder / "history.npz").write_bytes(history.dump())
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary_of(status)))
    log = EventLog(folder / "events.jsonl", "server")
    log.note("called", fragment=0, version=0)
    log.note("closed", fragment=0, version=0, members=["left"], weights=[1.0], why="all here")
    log.note("published", fragment=0, version=1, members=["left"], bytes=9)
    log.note("lapsed", region="left", silent_seconds=4.0)
    log.note("revived", region="left", silent_seconds=5.0)
    log.note("amended", number=1, by="ann", why="<i>slower</i>", set={"inner.batch": 4})
    log.close()
    return folder


def invoked(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


class Visible(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.outside = [], []

    def handle_starttag(self, tag, attrs):
        found = [value or "" for key, value in attrs if key in ("src", "href")]
        self.outside += [value for value in found if not value.startswith("#")]
        assert tag != "script"

    def handle_data(self, data):
        self.text.append(data)


def test_a_record_has_columns_of_equal_length(tmp_path):
    record = read_run(a_run(tmp_path / "run"))
    assert len({len(column) for column in record.evaluations.values()}) == 1
    assert record.evaluations["loss"][-1] == pytest.approx(4.0 - 39 / 20)
    assert len(record.regions["left"]["at"]) == len(record.regions["left"]["loss"]) == 40
    assert record.name == "trial" and "lapsed" in [event.kind for event in record.events()]


def test_the_report_shows_the_result_the_faults_and_the_settings(tmp_path):
    folder, out = a_run(tmp_path / "run"), tmp_path / "report.html"
    assert invoked("report", folder, "--out", out).exit_code == 0
    parser = Visible()
    parser.feed(out.read_text())
    text = " ".join(" ".join(parser.text).split())
    facts = ["Finished: 390 of 1000 tokens", "held-out 2.050", "lapsed", "model: '<b>'"]
    facts += ["once <upon> a <time>", "after 30 tokens, at outer step 3"]
    facts += ["inner.batch = 4; <i>slower</i>", "a region fell silent", "merging and publishing"]
    assert [fact for fact in facts if fact not in text] == []
    assert parser.outside == [] and out.stat().st_size < 500_000


def test_the_average_of_the_weights_stands_beside_them_where_there_is_one(tmp_path):
    found = {}
    for ema in (False, True):
        out = tmp_path / "report.html"
        folder = a_run(tmp_path / str(ema), ema=ema)
        assert invoked("report", folder, "--out", out).exit_code == 0
        text = out.read_text()
        facts = ("data-name='EMA'", "<td>their average</td>", "the average of the weights, at")
        found[ema] = [fact in text for fact in facts]
        assert len(read_run(folder).ema["loss"]) == (40 if ema else 0)
    assert found == {False: [False] * 3, True: [True] * 3}


class Cells(HTMLParser):
    """The rows of the table of evaluations."""

    def __init__(self):
        super().__init__()
        self.inside, self.rows = False, []

    def handle_starttag(self, tag, attrs):
        self.inside = self.inside or ("aria-label", "Evaluations") in attrs
        if self.inside and tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "table"

    def handle_data(self, data):
        if self.inside:
            self.rows[-1].append(data)


def test_each_evaluation_stands_in_a_row_with_its_own_time_and_outer_step(tmp_path):
    folder, out = a_run(tmp_path / "run"), tmp_path / "report.html"
    history = History(1)
    measured = [(6, {"heldout": 5.698, "heldout_at": 0}), (11, {"ema": 2.6887, "ema_at": 7})]
    losses = {}
    for second, found in [*measured, (30, {"heldout": 1.8, "heldout_at": 14})]:
        losses |= found
        applied = {"applied": 10 * (second - 6), "trained": 400}
        history.sample(second, make_status(seconds=float(second), loss=losses, tokens=applied))
    (folder / "history.npz").write_bytes(history.dump())
    assert invoked("report", folder, "--out", out).exit_code == 0
    cells = Cells()
    cells.feed(out.read_text())
    assert cells.rows == [
        ["time", "merged tokens", "outer step", "of", "held-out loss"],
        ["6 s", "0", "0", "the weights", "5.6980"],
        ["11 s", "50", "7", "their average", "2.6887"],
        ["30 s", "240", "14", "the weights", "1.8000"],
    ]


def test_of_many_evaluations_both_kinds_are_listed_to_the_last(tmp_path):
    folder, out = a_run(tmp_path / "run", seconds=500, ema=True), tmp_path / "report.html"
    assert invoked("report", folder, "--out", out).exit_code == 0
    cells = Cells()
    cells.feed(out.read_text())
    rows = [row for row in cells.rows if row]
    assert 50 <= len(rows) <= 63
    for kind in ("the weights", "their average"):
        mine = [row for row in rows if row[3] == kind]
        assert len(mine) > 24 and mine[-1][2] == "499"


def test_a_run_without_summary_or_curves_has_a_report_too(tmp_path):
    folder = a_run(tmp_path / "run", summary=False)
    (folder / "history.npz").unlink()
    assert invoked("report", folder, "--out", tmp_path / "r.html").exit_code == 0
    assert "no summary was written yet" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("damage", [b"", b"\0\xff" * 9, b"[]", b"null", b"[" * 200_000])
@pytest.mark.parametrize("name", ["summary.json", "spec.resolved.yaml"])
def test_a_run_with_a_damaged_file_has_a_report_of_the_rest(tmp_path, name, damage):
    folder, out = a_run(tmp_path / "run"), tmp_path / "r.html"
    (folder / name).write_bytes(damage if name == "summary.json" else damage[:1000])
    assert invoked("report", folder, "--out", out).exit_code == 0
    assert "class='line" in out.read_text()
    assert invoked("compare", folder, folder, "--out", out).exit_code == 0


def test_two_hundred_regions_with_strange_names_and_a_clock_that_jumped(tmp_path):
    folder, out = a_run(tmp_path / "run", "🦀 <i>run</i> מחוז", seconds=3), tmp_path / "r.html"
    strange = ["x" * 64, "מחוז", "🦀" * 5, "<b>&'", *(f"region-{n}" for n in range(196))]
    regions = [{"name": name, "alive": True, "loss": 3.0, "share": 0.005} for name in strange]
    history, status = History(1), make_status(name="🦀 <i>run</i> מחוז", regions=regions)
    for second in (0.0, 1.0, 5.0, 4e9, float("inf"), -3.0):
        history.sample(second, status)
    (folder / "history.npz").write_bytes(history.dump())
    (folder / "summary.json").write_text(json.dumps(summary_of(status)))
    assert invoked("report", folder, "--out", out).exit_code == 0
    text = out.read_text()
    assert "<i>run" not in text and "<b>&'" not in text and "x" * 64 in text
    assert len(text) < 500_000


def test_runs_are_laid_over_one_axis(tmp_path):
    runs = [a_run(tmp_path / name, name, seconds=20) for name in ("one", "two")]
    out = tmp_path / "compare.html"
    assert invoked("compare", *runs, "--out", out).exit_code == 0
    text = out.read_text()
    assert text.count("class='line thick r") == 2 and "one</small>" in text


def test_what_is_not_a_run_or_damaged_is_said(tmp_path):
    with pytest.raises(SpecError, match=r"spec\.resolved\.yaml"):
        read_run(tmp_path)
    folder = a_run(tmp_path / "run")
    (folder / "history.npz").write_bytes(b"rubbish")
    with pytest.raises(SpecError, match="damaged"):
        read_run(folder)


def visible(file):
    parser = Visible()
    parser.feed(file.read_text())
    assert parser.outside == []
    return " ".join(" ".join(parser.text).split())


def test_records_of_chaos_and_quality_have_reports(tmp_path):
    out, raw = tmp_path / "r.html", ROOT / "docs" / "results" / "raw"
    assert invoked("report", raw / "storm-4-324.json", "--out", out).exit_code == 0
    shown = visible(out)
    assert all(fact in shown for fact in ("eight-regions", "kill-trainer", "median of 34"))
    assert invoked("report", raw / "quality.jsonl", "--out", out).exit_code == 0
    assert all(fact in visible(out) for fact in ("data parallel", "regions 8", "+2.28 %"))

    folder = a_run(tmp_path / "run")
    (folder / "chaos.json").write_text((raw / "storm-4-324.json").read_text())
    assert invoked("report", folder, "--out", out).exit_code == 0
    assert "Inflicted faults" in visible(out) and "Finished: 390" in visible(out)


def cells_of(width, losses, **changed):
    """Records as `bench quality` writes them; `losses` by cell and seed."""
    for (cell, seed), loss in losses.items():
        settings = {"model": {"kind": "decoder", "width": width}, "tokens": 9000}
        record = {"cell": cell, "seed": seed, "id": f"{width} {cell} {seed}", "loss": loss}
        compared = {"against": "" if cell == "data parallel" else "data parallel"}
        yield {**record, **compared, "way": f"{width} {cell}", "settings": settings, **changed}


DP, TWO = "data parallel", "regions 2"
SMALL = {(DP, 1): 2.0, (DP, 2): 2.1, (TWO, 1): 2.02, (TWO, 2): 2.121}
LARGE = {(DP, 1): 1.0, (TWO, 1): 1.02, (TWO, 2): 1.03}


def quality_report(tmp_path, records):
    file, out = tmp_path / "quality.jsonl", tmp_path / "r.html"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert invoked("report", file, "--out", out).exit_code == 0
    return visible(out)


def test_cells_of_other_models_are_never_averaged_or_compared(tmp_path):
    """Taken together, the regions are 9 % better here; they are 1 and 2 % worse."""
    shown = quality_report(tmp_path, [*cells_of(32, SMALL), *cells_of(64, LARGE)])
    small, large = shown.split("decoder width 64")
    assert "decoder width 32, tokens 9,000" in small
    assert "data parallel 2 2.0500" in small and "regions 2 2 2.0705" in small
    assert "+1.00 % data parallel" in small and "+2.00 % data parallel" in large
    changes = re.findall(r"[+-]\d+\.\d\d %", shown)
    assert changes == ["+1.00 %", "+2.00 %"], "nothing else is held against anything"


def test_one_cell_at_two_learning_rates_is_two(tmp_path):
    fast = {(TWO, 1): 2.2, (TWO, 2): 2.31}
    records = [*cells_of(32, SMALL, lr=0.01), *cells_of(32, fast, lr=0.02, id="x", way="y")]
    with pytest.raises(SpecError, match="different settings"):
        quality_report(tmp_path, [{**record, "lr": 0.01} for record in records])
    for number, record in enumerate(records):
        record["id"] = str(number)
    shown = quality_report(tmp_path, records)
    assert "regions 2, lr 0.01 2 2.0705" in shown and "regions 2, lr 0.02 2 2.2550" in shown
    assert "+1.00 % data parallel" in shown and "+10.00 % data parallel" in shown


def test_old_records_are_parted_by_tokens_or_refused(tmp_path):
    def old(tokens, losses, tag=""):
        for (cell, seed), loss in losses.items():
            record = {"cell": cell, "seed": seed, "id": f"{tokens} {cell} {seed} {tag}"}
            yield {**record, "loss": loss, "tokens": tokens}

    shown = quality_report(tmp_path, [*old(9000, SMALL), *old(8000, LARGE)])
    assert "9,000 tokens; model, batch and sequence are not" in shown
    assert "+1.00 %" in shown and "+2.00 %" in shown
    known = list(old(9000, SMALL))
    assert "2.0705" in quality_report(tmp_path, [*known, *known]), "the same lines twice"
    with pytest.raises(SpecError, match=r"quality\.jsonl: the records of 'data parallel', seed 1"):
        quality_report(tmp_path, [*known, *old(9000, LARGE, "another model")])
    with pytest.raises(SpecError, match="is a record, and runs are compared"):
        invoked("compare", tmp_path / "quality.jsonl", tmp_path, "--out", tmp_path / "r.html")


@pytest.mark.parametrize("content", ["{}", "[1]", "rubbish", '{"faults": 3}'])
def test_a_file_that_is_no_record_is_said(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SpecError, match=r"x\.json"):
        invoked("report", tmp_path / "x.json", "--out", tmp_path / "r.html")


def test_samples_are_shown_as_text(tmp_path):
    (tmp_path / "spec.resolved.yaml").write_text("name: trial\n")
    sample = Sample("the newest weights", "def ", "<script>alert(1)</script>")
    made = Environment("1", "diloco report")
    shown = report(read_run(tmp_path), made, samples=[sample])
    assert "<b>def </b>&lt;script&gt;" in shown and "<script>" not in shown


def test_an_outage_without_an_end_lasts_until_the_log_ends(tmp_path):
    times = iter(range(100))
    log = EventLog(tmp_path / "events.jsonl", "server", clock=lambda: float(next(times)))
    log.note("lapsed", region="left", silent_seconds=0.0)
    log.note("revived", region="left", silent_seconds=1.0)
    log.note("lapsed", region="left", silent_seconds=0.0)
    log.note("trainer-died", region="right", code=-9, why="killed")
    log.close()
    told = digest(read_events(tmp_path / "events.jsonl"))
    assert told.away == {"left": [(0.0, 1.0), (2.0, None)]} and told.ended == 3.0
    assert told.moments == {"right": [(3.0, "trainer-died")]} and told.counts["lapsed"] == 2


def test_a_report_says_first_what_was_thrown_away_and_why_the_run_gave_up(tmp_path):
    folder = a_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"state": "stopped", "why": "no <use>", "hopeless": "no <use>"}
    summary["tokens"] |= {"trained": 1000, "refused": 900}
    (folder / "summary.json").write_text(json.dumps(summary))
    text = report(read_run(folder), Environment("1", "diloco report"))
    alarms = [part.partition("</p>")[0] for part in text.split("<p class='alarm'>")[1:]]
    assert alarms[:2] == ["900 tokens thrown away (90% of all)", "no &lt;use&gt;"]
    assert text.count("no &lt;use&gt;") == 1
