"""`diloco amend` on the folder of a stopped run, and starting a run with an edited spec."""

from __future__ import annotations

import asyncio
import getpass
import json
import shlex
import time
from pathlib import Path

import pytest

from diloco_cli.assemble import load_run, resolve, settings_of, spelled_out
from diloco_cli.core.journal_records import RunEnded, RunFinished
from diloco_cli.errors import SpecError
from diloco_cli.run.edited_spec import CURRENT, settle_spec
from diloco_cli.spec.resolved import write_resolved
from tests.cli.harness import STORED, RealBench, diloco, trained
from tests.server.harness import close_server

SPEC = STORED.replace("100_000", "3_000")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with one version of a fragment."""
    return trained(tmp_path, [0], SPEC)


def edited(folder: Path, *overrides: str) -> Path:
    """Starts the run in a folder with a spec that was edited so."""
    spec = spelled_out(load_run(folder.parent / "run.yaml", overrides).spec)
    return settle_spec(spec, folder).file


def test_a_stopped_run_is_amended_in_its_folder(capsys, folder):
    code, out, err = diloco(
        capsys, "amend", folder, "--set", "sync.quorum=2", "--set", "outer.lr=0.5", "--why", "slow"
    )
    assert code == 0, err
    assert "sync.quorum: 1 → 2  (at once)" in out
    assert "outer.lr: 0.4 → 0.5  (with the next version of each fragment)" in out
    assert "on record as amendment 1" in err
    code, out, err = diloco(capsys, "amend", folder, "--set", "sync.quorum=2")
    assert (code, out) == (0, "") and "has these settings already" in err
    code, out, _ = diloco(capsys, "amend", folder, "--undo", 1, "--format", "json")
    document = json.loads(out)
    assert code == 0 and document["terms"] == 2
    assert {it["key"]: it["after"] for it in document["changes"]} == {
        "sync.quorum": 1,
        "outer.lr": 0.4,
    }
    assert diloco(capsys, "replay", folder)[0] == 0


def test_the_status_of_a_stopped_run_shows_who_changed_what_and_when(capsys, folder):
    diloco(capsys, "amend", folder, "--set", "outer.lr=0.5", "--why", "slow")
    _, out, _ = diloco(capsys, "status", folder)
    line = next(line for line in out.splitlines() if line.startswith("amendment 1"))
    assert f"by {getpass.getuser()}: outer.lr=0.5 (slow)" in line
    assert time.strftime("%Y-%m-%d") in line
    _, out, _ = diloco(capsys, "status", folder, "--format", "json")
    (amendment,) = json.loads(out)["amendments"]
    assert amendment["set"] == {"outer.lr": 0.5} and amendment["why"] == "slow"


def test_a_dry_run_changes_nothing(capsys, folder):
    before = (folder / "server/journal").read_bytes()
    code, out, err = diloco(capsys, "amend", folder, "--set", "sync.quorum=2", "--dry-run")
    assert code == 0 and "sync.quorum" in out and "nothing was changed" in err
    assert (folder / "server/journal").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "model.width=64"], "model.width: never changes"),
        (["--set", "sync.quorum=9"], "sync.quorum: is 9 but regions lists 2"),
        (["--set", "outer.rate=1"], "outer.rate"),
        (["--set", "sync.quorum"], "is not KEY=VALUE"),
        (["--set", "sync.quorum=[1"], "is not YAML"),
        (["--remove-region", "oslo"], "regions.oslo: is not in the run"),
        (["--add-region", "left"], "regions.left: is in the run already"),
        (["--repace", "oslo"], "regions.oslo: is not in the run"),
        (["--repace", "left", "--undo", "1"], "--undo goes alone"),
        (["--undo", "7"], "there is no amendment 7: the run has none"),
        (["--set", "sync.quorom=1"], "Did you mean `sync.quorum`?"),
        (["--set", "server=1"], "server: is a section of the run spec"),
        (
            ["--set", "outer.lr=fast"],
            "outer.lr: The outer optimizer 'nesterov': lr needs a number; ",
        ),
        (["--undo", "1", "--set", "sync.quorum=1"], "--undo goes alone"),
        ([], "Nothing is to be changed"),
    ],
)
def test_what_cannot_be_amended_says_why_and_leaves_the_run_alone(capsys, folder, words, said):
    before = (folder / "server/journal").read_bytes()
    code, out, err = diloco(capsys, "amend", folder, *words)
    assert code == 2 and out == "" and said in err
    assert (folder / "server/journal").read_bytes() == before


def test_a_pace_is_learnt_anew_also_while_the_server_is_down(capsys, folder):
    code, out, err = diloco(capsys, "amend", folder, "--repace", "left", "--why", "new machines")
    assert code == 0, err
    assert out == "pace of left: unknown → learnt anew  (at once)\n"
    assert "on record as amendment 1" in err
    code, _, err = diloco(capsys, "amend", folder, "--undo", 1)
    assert code == 2 and "the old one is forgotten" in err and "regions.left.pace" in err
    assert diloco(capsys, "amend", folder, "--set", "regions.left.pace=2.5")[0] == 0
    code, _, err = diloco(capsys, "amend", folder, "--repace", "left")
    assert code == 2 and "is 2.5 in the spec, so nothing is learnt" in err
    assert diloco(capsys, "replay", folder)[0] == 0


def test_a_run_that_never_began_is_not_amended(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text(SPEC)
    spec = spelled_out(load_run(tmp_path / "run.yaml").spec)
    write_resolved(spec, tmp_path / "run")
    code, _, err = diloco(capsys, "amend", tmp_path / "run", "--set", "sync.quorum=2")
    assert code == 2 and "has not begun" in err


def test_a_finished_run_with_a_larger_budget_is_no_longer_finished(capsys, folder):
    spec = spelled_out(load_run(folder.parent / "run.yaml").spec)

    async def end() -> None:
        bench = RealBench(folder, settings_of(spec, resolve(spec)))
        bench.state.record(RunEnded("enough"))
        bench.state.record(RunFinished("enough"))
        await close_server(bench.server)

    asyncio.run(end())
    said = {"state": "finished", "why": "enough", "tokens": {"applied": 96.0, "budget": 3000}}
    (folder / "summary.json").write_text(json.dumps(said))
    code, _, err = diloco(capsys, "amend", folder, "--set", "budget.tokens=9000")
    assert code == 0 and "open again" in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "stopped" and summary["tokens"]["budget"] == 9000


def test_an_edited_spec_is_refused_with_the_command_that_makes_it_so(folder):
    with pytest.raises(SpecError) as refused:
        edited(folder, "sync.quorum=2", "outer={kind: nesterov, lr: 0.5}")
    assert "sync.quorum: 1 there, 2 here" in refused.value.message
    hint = refused.value.hint or ""
    assert f"diloco amend {folder} --set sync.quorum=2 --set outer.lr=0.5 makes it so" in hint


def test_the_command_in_the_refusal_makes_the_edited_spec_welcome(capsys, folder):
    changes = ["sync.quorum=2", "regions=[{name: left, inner: {batch: 4}}, {name: oslo}]"]
    with pytest.raises(SpecError) as refused:
        edited(folder, *changes)
    words = shlex.split((refused.value.hint or "").partition(" makes it so")[0])
    code, _, err = diloco(capsys, *words[1:])
    assert code == 0, err
    assert edited(folder, *changes).name == CURRENT
    edited(folder)  # The spec it began with is still one that it has had.


def test_a_key_that_never_changes_is_refused_with_the_way_out(folder):
    with pytest.raises(SpecError) as refused:
        edited(folder, "model.width=64")
    assert "start: {weights" in (refused.value.hint or "")


def test_another_runs_folder_is_refused_with_the_keys_that_differ(capsys, folder):
    code, _, said = diloco(
        capsys, "run", folder.parent / "run.yaml", "--dir", folder, "--set", "seed=7"
    )
    assert code == 2 and "seed: 0 there, 7 here" in said and "--fresh" in said


def test_hosts_may_differ_from_start_to_start(folder):
    file = edited(folder, "server.listen=127.0.0.1:7399", "regions.0.speed=0.5")
    current = load_run(file).spec
    assert current.server.listen == "127.0.0.1:7399" and current.region("left").speed == 0.5
    spec = spelled_out(load_run(folder.parent / "run.yaml", ["server.listen=127.0.0.1:7399"]).spec)
    assert settle_spec(spec, folder).first.server.listen == "127.0.0.1:7399"
    assert load_run(edited(folder)).spec.server.listen == "127.0.0.1:0"


def test_where_the_server_listens_can_be_amended_for_its_next_start(capsys, folder):
    code, out, err = diloco(capsys, "amend", folder, "--set", "server.listen=127.0.0.1:7398")
    assert code == 0, err
    assert "(at the server's next start)" in out
    spec = spelled_out(load_run(folder.parent / "run.yaml").spec)
    assert settle_spec(spec, folder).first.server.listen == "127.0.0.1:7398"
