"""The resolved spec says everything, loads to the same run, and never changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.spec.amendable import changes_in_a_run
from diloco_cli.spec.resolved import resolved, resolved_yaml, write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.spec.yaml_source import read
from tests.spec.short_spec import GOOD, loaded

ORDER = "spec name seed budget model data inner regions sync merge outer wire server evaluate"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("sync.grace={kind: fixed, seconds: 3}", "sync.adopt=blend", "sync.blend=0.25"),
        ("sync.grace.kind=none", "sync.adopt=replace"),
        ("regions.0={name: '1e5', inner: {batch: 4}, data: {kind: text, files: ['7', 'no']}}",),
    ],
)
def test_the_resolved_spec_loads_to_the_same_run(overrides: tuple[str, ...]):
    spec = loaded(GOOD, *overrides)
    assert loaded(resolved_yaml(spec)) == spec


@given(st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,8}[a-z0-9])?", fullmatch=True))
def test_a_name_that_looks_like_something_else_stays_a_name(name: str):
    spec = RunSpec.model_validate({**resolved(loaded()), "name": name})
    assert read(resolved_yaml(spec), "run.yaml").data["name"] == name


def test_defaults_are_spelled_out_in_the_order_of_the_reference():
    data = read(resolved_yaml(loaded()), "run.yaml").data
    assert " ".join(data) == f"{ORDER} plugins"
    assert data["sync"]["staleness"] == 2
    assert data["wire"]["down"] == {"kind": "int4", "block": 512}


def test_it_is_written_once(tmp_path: Path):
    file = write_resolved(loaded(), tmp_path / "runs" / "story")
    before = os.stat(file).st_mtime_ns
    assert write_resolved(loaded(), tmp_path / "runs" / "story") == file
    assert os.stat(file).st_mtime_ns == before
    assert [path.name for path in file.parent.iterdir()] == ["spec.resolved.yaml"]


def test_another_spec_in_the_same_folder_is_refused_with_the_keys_that_differ(tmp_path: Path):
    write_resolved(loaded(), tmp_path)
    with pytest.raises(SpecError) as caught:
        write_resolved(loaded(GOOD, "sync.quorum=2", "regions.1.speed=0.5"), tmp_path)
    assert "sync.quorum: 1 there, 2 here" in caught.value.message
    assert "regions.1.speed: 1.0 there, 0.5 here" in caught.value.message
    assert "every" not in caught.value.message
    assert "--fresh" not in (caught.value.hint or ""), "`work` has no such option"
    assert "--dir" in (caught.value.hint or "")


def test_a_worker_may_come_with_other_settings_but_not_with_another_run(tmp_path: Path):
    file = write_resolved(loaded(GOOD, "server.certs=certs"), tmp_path)
    before = file.read_bytes()
    changed = loaded(GOOD, "regions.1.speed=0.5", "wire.rate_limit=8Mbit", "sync.quorum=2")
    assert write_resolved(changed, tmp_path, may_differ=changes_in_a_run) == file
    assert file.read_bytes() == before
    with pytest.raises(SpecError, match=r"server.certs: 'certs' there, absent here"):
        write_resolved(loaded(), tmp_path)
    with pytest.raises(SpecError, match=r"seed: 0 there, 7 here") as caught:
        write_resolved(
            loaded(GOOD, "seed=7", "sync.quorum=2"), tmp_path, may_differ=changes_in_a_run
        )
    assert "quorum" not in caught.value.message


def test_an_option_that_is_only_on_one_side_is_called_absent(tmp_path: Path):
    write_resolved(loaded(), tmp_path)
    with pytest.raises(SpecError, match=r"outer.nesterov: absent there, True here"):
        write_resolved(loaded(GOOD, "outer.nesterov=true"), tmp_path)


@pytest.mark.parametrize("damage", ["", "spec: 1\nna", "{", "\x00"])
def test_a_damaged_copy_is_damaged_state_not_a_wrong_spec(tmp_path: Path, damage: str):
    write_resolved(loaded(), tmp_path).write_text(damage)
    with pytest.raises(StoreError, match="is damaged"):
        write_resolved(loaded(), tmp_path)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        write_resolved(loaded(), tmp_path / "runs" / "story")
