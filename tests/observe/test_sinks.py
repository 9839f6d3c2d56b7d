"""What goes to the tools of others is read back as they read it."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from diloco_cli.observe.history import History
from diloco_cli.observe.metrics_file import FILE, MetricsFile
from diloco_cli.observe.sinks.points import RUN, ObservedRun, RunPoints
from diloco_cli.system.locks import FileLock
from tests.observe.documents import make_status

NOON = 1_790_000_000.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def add_lines(folder: Path, region: str, steps: range, *, clock: Clock | None = None) -> None:
    """A region whose loss falls by a hundredth a step, while the run merges 100 tokens a step."""
    home = folder / "regions" / region
    home.mkdir(parents=True, exist_ok=True)
    steady, wall = Clock(), Clock()
    file = MetricsFile(home, clock=wall, steady=steady)
    for step in steps:
        steady.now, wall.now = 10.0 * step, NOON + step
        fields = {"tokens": 100.0 * step, "trained": 50.0 * step, "loss": 5 - step / 100}
        file.note(step, 1.0, {**fields, "learning_rate": 0.01, "gradient_norm": 1.5})
    file.close()


def write_history(folder: Path, seconds: int) -> None:
    history = History(1)
    for second in range(seconds):
        status = make_status(
            seconds=float(second),
            outer_steps=second,
            tokens={"applied": 100 * second, "trained": 100 * second},
            loss={"heldout": 4.0 - (second // 10) / 10, "heldout_at": second // 10 * 10},
            regions=[
                {"name": "left", "alive": True, "loss": 3.0, "tokens_per_second": 9.0},
                {"name": "far", "alive": True, "loss": 2.5, "tokens_per_second": 8.0},
            ],
        )
        history.sample(second, status)
    path = folder / "history.npz"
    path.write_bytes(history.dump())
    os.utime(path, (NOON + seconds, NOON + seconds))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that is over, with a region here and one on another host."""
    made = tmp_path / "runs" / "trial"
    made.mkdir(parents=True)
    (made / "spec.resolved.yaml").write_text("name: trial\nserver: {listen: 'secret:1'}\n")
    add_lines(made, "left", range(1, 31))
    write_history(made, 30)
    return made


@pytest.mark.parametrize("damage", [b"", b"\xff" * 9, b"[]", b"{"])
def test_a_run_with_a_damaged_spec_goes_by_the_name_of_its_folder(folder: Path, damage: bytes):
    (folder / "spec.resolved.yaml").write_bytes(damage)
    assert ObservedRun(folder).name == "trial"


def observed(*words: object, check: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "diloco_cli", "observe", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_points_come_once_and_regions_of_other_hosts_from_the_history(folder):
    points = RunPoints(ObservedRun(folder))
    found = points.more(over=True)
    assert points.more(over=True) == []
    assert [point.time for point in found] == sorted(point.time for point in found)
    left = [point for point in found if point.region == "left"]
    assert [point.tokens for point in left] == [100.0 * step for step in range(1, 31)]
    far = [point for point in found if point.region == "far"]
    assert len(far) == 30 and all(point.values["loss"] == 2.5 for point in far)
    heldout = [point for point in found if "heldout_loss" in point.values]
    assert [round(point.values["heldout_loss"], 3) for point in heldout] == [4.0, 3.9, 3.8]
    assert all(NOON - 1 <= point.time <= NOON + 31 for point in found)
    add_lines(folder, "left", range(31, 33))
    assert [point.values["step"] for point in points.more(over=True)] == [31, 32]


def test_of_a_run_that_goes_on_the_newest_row_waits_until_it_is_whole(folder):
    points = RunPoints(ObservedRun(folder))
    early = [point for point in points.more(over=False) if point.region == RUN]
    late = [point for point in points.more(over=True) if point.region == RUN]
    assert len(late) == 1 and late[0].time > max(point.time for point in early)


def test_a_damaged_history_and_deleted_lines_leave_the_rest(folder):
    (folder / "history.npz").write_bytes(b"no")
    points = RunPoints(ObservedRun(folder))
    assert {point.region for point in points.more(over=True)} == {"left"}
    (folder / "regions" / "left" / FILE).unlink()
    assert points.more(over=True) == []


def test_csv_has_a_table_for_each_region_and_one_of_the_run(folder, tmp_path):
    out = tmp_path / "tables"
    for _ in range(2):  # The second time replaces the first.
        assert "points were passed on" in observed(folder, "--to", "csv", "--out", out)
    with (out / "regions" / "left.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tokens"]) for row in rows] == [100.0 * step for step in range(1, 31)]
    assert (rows[4]["step"], rows[4]["loss"], rows[4]["mfu"]) == ("5", "4.95", "")
    with (out / "run.csv").open(newline="") as file:
        losses = [row["heldout_loss"] for row in csv.DictReader(file) if row["heldout_loss"]]
    assert [round(float(loss), 3) for loss in losses] == [4.0, 3.9, 3.8]
    assert sorted(path.name for path in (out / "regions").iterdir()) == ["far.csv", "left.csv"]


@pytest.mark.parametrize("tool", ["csv", "tensorboard", "wandb"])
def test_a_folder_that_cannot_be_made_is_a_wrong_command(folder, tmp_path, tool):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "x"
    said = observed(folder, "--to", tool, "--out", place, check=2)
    assert f"--out: {place} cannot be made: {tmp_path / 'file'} is a file" in said


def test_tensorboard_reads_what_was_written_over_merged_tokens(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = folder / "observe" / "tensorboard"
    earlier = out / "run" / "events.out.tfevents.1.host.diloco"
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes(b"")
    observed(folder, "--to", "tensorboard")
    assert not earlier.exists()

    def scalars(name: str, tag: str) -> list[tuple[int, float, float]]:
        found = reader.EventAccumulator(str(out / name))
        found.Reload()
        return [(event.step, event.value, event.wall_time) for event in found.Scalars(tag)]

    left = scalars("regions/left", "loss")
    assert [step for step, *_ in left] == [100 * step for step in range(1, 31)]
    assert left[4][1] == pytest.approx(4.95) and left[4][2] == NOON + 5
    heldout = scalars("run", "heldout_loss")
    assert [value for _, value, _ in heldout] == pytest.approx([4.0, 3.9, 3.8])
    assert len(scalars("regions/far", "tokens_per_second")) == 30


class OtlpServer(ThreadingHTTPServer):
    """The other side: takes OTLP over HTTP and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.bodies: list[bytes] = []
        self.refuse = 0


class _Take(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        import gzip

        assert isinstance(self.server, OtlpServer)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.refuse:
            self.server.refuse -= 1
            self.send_response(400)
        else:
            self.server.bodies.append(body)
            self.send_response(200 if self.path == "/v1/metrics" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[OtlpServer]:
    with OtlpServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_collector_gets_gauges_with_the_times_they_were_measured_at(folder, collector):
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    observed(folder, "--to", "otlp", "--out", f"http://127.0.0.1:{collector.server_port}")
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for body in collector.bodies:
        request = service.ExportMetricsServiceRequest.FromString(body)
        for resource in request.resource_metrics:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert (about["service.name"], about["diloco.run"]) == ("diloco", "trial")
            for metric in resource.scope_metrics[0].metrics:
                for data in metric.gauge.data_points:
                    named = {each.key: each.value.string_value for each in data.attributes}
                    key = metric.name, named.get("region", "")
                    points.setdefault(key, []).append((data.time_unix_nano, data.as_double))
    left = points["diloco.region.loss", "left"]
    assert left[4] == (int((NOON + 5) * 1e9), 4.95) and len(left) == 30
    assert [value for _, value in points["diloco.region.tokens", "left"]][-1] == 3000.0
    assert len(points["diloco.run.heldout_loss", ""]) == 3
    assert len(points["diloco.region.loss", "far"]) == 30


def test_a_collector_that_is_not_there_or_refuses_is_said_with_exit_code_4(folder, collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector.refuse = 1000
    url = f"http://127.0.0.1:{collector.server_port}"
    assert f"The collector at {url} does not take" in observed(
        folder, "--to", "otlp", "--out", url, check=4
    )


def log_records(data: bytes) -> Iterator[bytes]:
    """Reads the log format of LevelDB, which a `.wandb` file has after seven bytes of its own."""
    block, place, record = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # Whole, or the last part.
            yield record
            record = b""


def test_wandb_offline_files_hold_the_points(folder, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "wandb-files"
    observed(folder, "--to", "wandb", "--out", out)
    (file,) = out.glob("**/*.wandb")
    rows, config = [], ""
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {(each.key or "/".join(each.nested_key)): each.value_json for each in items}
            )
        elif record.WhichOneof("record_type") == "run":
            config = str(record.run.config)
    losses = [
        (row["tokens"], row["regions/left/loss"]) for row in rows if "regions/left/loss" in row
    ]
    assert len(losses) == 30 and losses[4] == ("500", "4.95")
    assert "secret" not in config


def test_a_tool_that_is_not_installed_is_said_with_the_line_that_installs_it(folder):
    code = "import sys; sys.modules['tensorboardX'] = None; from diloco_cli.__main__ import main;"
    code += f"sys.argv = ['diloco', 'observe', {str(folder)!r}]; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "--to tensorboard needs tensorboardX, which is not installed" in done.stderr
    assert "pip install 'diloco-cli[tensorboard]'" in done.stderr


def started(folder: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "diloco_cli", "observe", folder, "--to", "csv", "--out", out]
    return subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)


def wait_for_rows(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < 1 + count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_goes_on_is_followed_until_it_ends(folder, tmp_path):
    table = tmp_path / "out" / "regions" / "left.csv"
    lock = FileLock(folder / "run.lock")
    lock.acquire()
    process = started(folder, tmp_path / "out")
    try:
        wait_for_rows(table, 30)
        add_lines(folder, "left", range(31, 34))
        wait_for_rows(table, 33)
        assert process.poll() is None, "it goes on while the run does"
        (folder / "summary.json").write_text('{"state": "finished"}')
        add_lines(folder, "left", range(34, 36))
        lock.release()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
    assert table.read_text().count("\n") == 1 + 35


def test_ctrl_c_ends_it_in_good_order(folder, tmp_path):
    with FileLock(folder / "run.lock").held():
        process = started(folder, tmp_path / "out")
        try:
            wait_for_rows(tmp_path / "out" / "regions" / "left.csv", 30)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "points were passed on" in said and "Traceback" not in said
