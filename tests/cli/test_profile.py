"""`diloco profile` says why there is nothing to trace."""

from __future__ import annotations

import pytest

from diloco_cli.assemble import load_run, spelled_out
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.system.locks import FileLock
from diloco_cli.worker.mailbox import TRAINER_LOCK, Mailbox
from tests.cli.harness import SPEC, diloco


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.yaml").write_text(SPEC)
    write_resolved(spelled_out(load_run(tmp_path / "run.yaml").spec), tmp_path / "run")
    Mailbox(tmp_path / "run" / "regions" / "left").prepare()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("region", "code", "words"),
    [
        ("lefd", 2, "There is no region 'lefd' in"),
        ("right", 2, "Region right does not train from"),
        ("left", 4, "Region left is not running: no trainer works in"),
    ],
)
def test_a_region_that_cannot_be_traced_is_named(folder, capsys, region, code, words):
    got, out, err = diloco(capsys, "profile", folder, "--region", region)
    assert (got, out) == (code, "")
    assert words in err and "hint:" in err and "Traceback" not in err
    if region == "right":
        assert "the regions here are left" in err and "on the host of right" in err


def test_a_server_cannot_be_traced(capsys):
    code, _, err = diloco(capsys, "profile", "http://127.0.0.1:1", "--region", "left")
    assert code == 2 and "a trace is made where the region trains" in err


def test_a_region_that_makes_no_steps_is_not_waited_for_without_end(folder, capsys):
    mailbox = Mailbox(folder / "regions" / "left")
    with FileLock(mailbox.folder / TRAINER_LOCK).held():
        code, _, err = diloco(capsys, "profile", folder, "--region", "left", "--wait", "0.1")
    assert code == 1 and "has not made 5 steps within 0.1 s; it is starting" in err
    assert not mailbox.profile_file.exists()  # It is asked no more.


def test_one_trace_at_a_time(folder, capsys):
    with FileLock(folder / "regions" / "left" / "profile.lock").held():
        code, _, err = diloco(capsys, "profile", folder, "--region", "left")
    assert code == 2 and "is being traced for process" in err
