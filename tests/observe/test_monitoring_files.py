"""Alerts and dashboard ask only for metrics that there are, and Prometheus' own tool takes them."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from diloco_cli.observe.prometheus import METRICS, ServerFacts, process_text, prometheus_text
from tests import ROOT
from tests.observe.documents import make_status

FOLDER = ROOT / "pipelines" / "observe"

STATUS = make_status(
    state="training",
    outer_steps=12,
    regions=[{"name": "paris", "alive": True, "step": 7, "silent_seconds": 0.4}],
)


def expressions():
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for group in rules:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_every_expression_names_metrics_that_there_are():
    found = list(expressions())
    assert len(found) > 20
    for title, expression in found:
        for name in re.findall(r"\bdiloco_\w+", expression):
            assert name in METRICS, f"{title}: {name}"


FACTS = ServerFacts(
    version="1.2",
    disk_free=99,
    answers={("contribute", 201): 3, ("status", 401): 2},
    expiries={"server": 1.8e9, "upload:paris": 1.9e9},
    rounds={"count": 4, "seconds": 6.0},
)


def test_answers_expiries_and_rounds_are_in_the_metrics():
    text = process_text(FACTS)
    assert 'diloco_http_requests_total{call="contribute",code="201"} 3.0' in text
    assert 'diloco_expiry_timestamp_seconds{of="upload:paris"} 1.9e+09' in text
    assert "diloco_round_seconds_count 4.0" in text and "diloco_round_seconds_sum 6.0" in text


def test_what_only_grows_is_a_counter():
    text = prometheus_text(make_status())
    for name in ("outer_steps", "wire_bytes", "region_restarts", "region_refused"):
        assert f"# TYPE diloco_{name}_total counter" in text


def test_trouble_and_process_are_in_the_metrics():
    text = prometheus_text(STATUS) + process_text(FACTS)
    assert "diloco_trouble 0.0" in text and 'diloco_build_info{version="1.2"} 1.0' in text
    assert "diloco_disk_free_bytes 99.0" in text and "process_resident_memory_bytes" in text
    assert 'diloco_region_silent_seconds{region="paris"} 0.4' in text
    full = prometheus_text(make_status(trouble="the disk is full"))
    assert "diloco_trouble 1.0" in full and "diloco_warnings 1.0" in full


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_takes_rules_configuration_and_metrics():
    def promtool(*words, text=None):
        done = subprocess.run(
            ["promtool", *words], input=text, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("check", "rules", str(FOLDER / "alerts.yaml"))
    promtool("check", "config", str(FOLDER / "prometheus.yaml"))
    text = prometheus_text(STATUS) + process_text(FACTS)
    promtool("check", "metrics", text=text)
