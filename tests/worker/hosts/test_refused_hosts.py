"""`diloco work` on a host that cannot take part: a sentence, a hint, the documented exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco_cli.assemble import load_run, spelled_out
from diloco_cli.launch.ports import free_addresses
from diloco_cli.worker.handover import trainer_digest
from diloco_cli.worker.hosts import listener
from diloco_cli.worker.hosts.lead import Lead
from diloco_cli.worker.hosts.listener import RegionTerms
from diloco_cli.worker.hosts.secret import VARIABLE, take_secret
from diloco_cli.worker.hosts.which_host import HostPlace

SPEC = {
    "spec": 1,
    "name": "pair",
    "budget": {"tokens": 10**6},
    "regions": [{"name": "paris", "mesh": {"fsdp": 4}, "hosts": 2}],
}
KNOWN = "known to both"


@pytest.fixture
def coordinator() -> str:
    return free_addresses(1)[0]


@pytest.fixture
def lead(coordinator, tmp_path, monkeypatch):
    """A host 0 that waits for the other."""
    monkeypatch.setenv(VARIABLE, KNOWN)
    secret = take_secret("pair", "paris", token="", folder=tmp_path)
    spec = spelled_out(load_run(written(tmp_path / "first.yaml")).spec)
    terms = RegionTerms(HostPlace(0, 2, coordinator), spec, "paris", trainer_digest(spec, "paris"))
    made = Lead(terms, secret, tmp_path)
    yield made
    made.close()


def written(path: Path, **changes) -> Path:
    path.write_text(yaml.safe_dump({**SPEC, **changes}))
    return path


def diloco(folder: Path, *words: str, known: str = KNOWN) -> tuple[int, str]:
    with subprocess.Popen(
        [sys.executable, "-m", "diloco_cli", *words],
        env={**os.environ, VARIABLE: known},
        cwd=folder,
        stdin=subprocess.PIPE,  # Open to the end: a follower ends with its parent.
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        code = process.wait()
    assert "Traceback" not in said
    return code, said


def second_host(folder: Path, spec: Path, coordinator: str, *more: str, **options) -> tuple:
    words = ["work", str(spec), "--region", "paris", "--coordinator", coordinator, "--wait", "0"]
    return diloco(folder, *words, *(more or ("--host", "1")), **options)


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        ({"inner": {"batch": 32}}, "inner.batch is 32 there and 16 on host 0", "the same file"),
        (
            {"regions": [{"name": "paris", "mesh": {"data": 4}, "hosts": 2}]},
            "regions.paris.mesh.data is 4 there and 1 on host 0",
            "the same file",
        ),
        (
            {"regions": [{"name": "paris", "mesh": {"fsdp": 4}, "hosts": 4}]},
            "has 2 hosts, says host 0; the caller says it is host 1 of 4",
            "same --hosts",
        ),
    ],
    ids=["spec", "mesh", "hosts"],
)
def test_a_host_that_disagrees_ends_with_2(lead, coordinator, tmp_path, changes, words, hint):
    other = written(tmp_path / "second.yaml", **changes)
    code, said = second_host(tmp_path, other, coordinator)
    assert code == 2 and words in said and hint in said, said


def test_a_host_of_another_release_ends_with_2(lead, coordinator, tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "release", lambda: "diloco 9.9 (wire 1) with jax 9.9")
    code, said = second_host(tmp_path, tmp_path / "first.yaml", coordinator)
    assert code == 2 and "Host 0 runs diloco 9.9 (wire 1) with jax 9.9, host 1 runs diloco " in said
    assert "Install the same release on all hosts of a region." in said


def test_a_host_without_the_secret_ends_with_3(lead, coordinator, tmp_path):
    code, said = second_host(tmp_path, tmp_path / "first.yaml", coordinator, known="guessed")
    assert code == 3 and "does not know this region's secret" in said and VARIABLE in said


def test_a_coordinator_that_is_not_there_ends_with_4(coordinator, tmp_path):
    code, said = second_host(tmp_path, written(tmp_path / "first.yaml"), coordinator)
    assert code == 4 and f"Nobody listens at {coordinator}" in said
    assert "Is host 0 of this region running, and is this its --coordinator?" in said


def test_a_coordinator_that_is_no_address_ends_with_2(tmp_path):
    code, said = second_host(tmp_path, written(tmp_path / "first.yaml"), "nowhere")
    assert code == 2 and "'nowhere' is not HOST:PORT" in said and "node1:7351" in said


def test_a_follower_of_an_older_generation_ends_with_4(lead, coordinator, tmp_path):
    words = ["follower", "pair", "--region", "paris", "--hosts", "2", "--host", "1"]
    words += ["--coordinator", coordinator, "--own", lead.terms.own, "--generation", "0-gone"]
    known = handed_down(tmp_path)
    code, said = diloco(tmp_path, *words, known=known)
    assert code == 4 and f"generation 0-gone has come to generation {lead.generation}" in said
    assert "its supervisor starts one of this generation" in said


def handed_down(folder: Path) -> str:
    """What a supervisor gives its follower."""
    os.environ[VARIABLE] = KNOWN  # It is taken out again.
    return take_secret("pair", "paris", token="", folder=folder).hex()
