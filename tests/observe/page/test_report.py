"""A report says what the run's files say, needs nobody, and survives what is missing."""

import json
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from diloco_cli import read_run
from diloco_cli.cli.app import app
from diloco_cli.errors import SpecError
from diloco_cli.observe.events import EventLog
from diloco_cli.observe.history import History
from diloco_cli.observe.run_record import summary_of
from tests.observe.documents import make_status


def a_run(folder, name="trial", *, seconds=40, summary=True):
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
            loss={"heldout": 4.0 - second / 20, "heldout_at": second},
            regions=[{"name": "left", "alive": True, "loss": 3.0, "tokens_per_second": 9.0}],
        )
        history.sample(second, status)
    (folder / "history.npz").write_bytes(history.dump())
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary_of(status)))
    log = EventLog(folder / "events.jsonl", "server")
    log.note("lapsed", region="left", silent_seconds=4.0)
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
    assert record.name == "trial" and [event.kind for event in record.events()] == ["lapsed"]


def test_the_report_shows_the_result_the_faults_and_the_settings(tmp_path):
    folder, out = a_run(tmp_path / "run"), tmp_path / "report.html"
    assert invoked("report", folder, "--out", out).exit_code == 0
    parser = Visible()
    parser.feed(out.read_text())
    text = " ".join(" ".join(parser.text).split())
    for fact in ("Finished: 390 of 1000 tokens", "held-out 2.050", "lapsed", "model: '<b>'"):
        assert fact in text
    assert parser.outside == [] and out.stat().st_size < 500_000


def test_a_run_without_summary_or_curves_has_a_report_too(tmp_path):
    folder = a_run(tmp_path / "run", summary=False)
    (folder / "history.npz").unlink()
    assert invoked("report", folder, "--out", tmp_path / "r.html").exit_code == 0
    assert "no summary was written yet" in (tmp_path / "r.html").read_text()


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
