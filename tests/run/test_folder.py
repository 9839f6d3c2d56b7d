"""A run may live in a folder of its own, and in no other."""

import os
from pathlib import Path

import pytest

from diloco_cli.assemble import load_run
from diloco_cli.data.heldout import HeldoutFile, HeldoutText
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.run.copies import back_up
from diloco_cli.run.edited_spec import settle_spec
from diloco_cli.run.find_credential import for_calls
from diloco_cli.run.folder import (
    SpecPlace,
    Target,
    default_folder,
    heldout_rows,
    refuse_foreign,
    spec_base,
)
from diloco_cli.run.model.find import find_model
from diloco_cli.server.access.issue import CredentialFolder
from tests import ROOT
from tests.cli.harness import STORED, trained
from tests.data.corpora import write_tokenizer


@pytest.mark.parametrize(
    "spec, folder",
    [
        ("my-run/run.yaml", "my-run/runs/NAME"),
        ("specs/first.yaml", "runs/NAME"),
        ("elsewhere/spec.resolved.yaml", "elsewhere"),
        ("elsewhere/spec.current.yaml", "elsewhere"),
    ],
)
def test_a_run_is_kept_where_the_reference_says(spec, folder):
    assert default_folder(Path(spec), "NAME") == Path(folder)
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text("utf-8")
    page = page.partition("## What is in it")[0]
    (row,) = [line for line in page.splitlines() if f"`{spec.removeprefix('elsewhere/')}`" in line]
    assert folder == "elsewhere" or f"`{folder}`" in row


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not lose this")
    with pytest.raises(SpecError, match=r"is not a run folder: it holds thesis\.tex"):
        refuse_foreign(tmp_path)


@pytest.mark.parametrize(
    "damage", [b"", b"\xff" * 9, b"[]", b"5", b"server: 5", b"server: {certs: 5}"]
)
def test_a_damaged_spec_of_a_run_is_named_by_who_asks_its_server(tmp_path, damage):
    (tmp_path / "spec.resolved.yaml").write_bytes(damage)
    with pytest.raises(StoreError, match=r"spec\.resolved\.yaml is damaged") as told:
        for_calls(Target("http://127.0.0.1:1", tmp_path), None)
    assert told.value.hint


def test_a_start_that_could_write_nothing_is_no_obstacle(tmp_path):
    """A worker on a full disk leaves its lock and nothing in it; with room it goes on."""
    region = tmp_path / "regions" / "left"
    region.mkdir(parents=True)
    (region / "lock").touch()
    refuse_foreign(tmp_path)
    (region / "checkpoint.safetensors").write_bytes(b"work")
    with pytest.raises(SpecError, match="is not a run folder"):
        refuse_foreign(tmp_path)


def test_the_held_out_text_of_each_region_is_told_once_where_it_is_the_same(tmp_path):
    def listed(region: str, size: int) -> None:
        (tmp_path / "regions" / region).mkdir(parents=True)
        file = HeldoutFile("a.txt", size, 1000, 1.0)
        HeldoutText("/corpus", size, 1000, (file,)).write(
            tmp_path / "regions" / region / "heldout.json"
        )

    assert heldout_rows(tmp_path) == []
    listed("left", 50)
    listed("right", 50)
    (row,) = heldout_rows(tmp_path)
    assert row == ("held-out text", "the end of 1 file, 50 B, 5.0% of the text: a.txt 100%")
    listed("third", 80)
    assert [label for label, _ in heldout_rows(tmp_path)] == [
        "held-out text of left, right",
        "held-out text of third",
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    """A run that was started beside its spec, where its tokenizer and certificates are."""
    home = tmp_path / "project"
    write_tokenizer(home, name="t.json")
    data = "{kind: jsonl, files: [c.jsonl], tokenizer: {kind: hf, file: t.json}}"
    text = STORED.replace("heads: 2", "heads: 2, vocabulary: 320")
    text = text.replace("{kind: python-source}", data).replace("{store:", "{certs: certs, store:")
    monkeypatch.chdir(home)
    CredentialFolder(home / "certs").create_missing("tiny", [], 30)
    trained(home, [0], text)
    settle_spec(load_run(home / "run" / "spec.resolved.yaml").spec, home / "run")
    return home


def test_paths_of_a_runs_own_spec_are_those_of_its_start_wherever_a_command_is(
    project: Path, tmp_path: Path, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(elsewhere)
    run = Path("..") / "moved" / "run"
    assert spec_base(run) == moved
    assert find_model(str(run)).needed_text().encode("fox")
    assert for_calls(Target(None, run), None).token
    copy = back_up(run, tmp_path / "copies", keep=1)
    assert (copy / "certs" / "ca.key").exists()
    place = SpecPlace(run / "spec.resolved.yaml")
    assert Path.cwd() == moved and place.path(Path("a")) == elsewhere / "a"
    os.chdir(elsewhere)
    (moved / "run" / "spec.folder").unlink()
    assert spec_base(run) == elsewhere
