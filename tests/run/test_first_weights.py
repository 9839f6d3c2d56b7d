"""A run begins with the weights that `start` names, to the bit, or says what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_cli.assemble import load_run, resolve, settings_of, shared_digest, spelled_out
from diloco_cli.errors import SpecError, StoreDamaged
from diloco_cli.run.find_credential import for_start
from diloco_cli.run.first_weights import first_weights
from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.spec.resolved import resolved, write_resolved
from diloco_cli.spec.schema import RunSpec
from tests.cli.harness import SPEC, diloco
from tests.server.harness import Bench, close_server, in_a_loop, kill_server


def load(place: Path, name: str, *overrides: str) -> RunSpec:
    (place / f"{name}.yaml").write_text(SPEC.replace("tiny", name))
    return spelled_out(load_run(place / f"{name}.yaml", overrides).spec)


class RealBench(Bench):
    """The harness's bench, with a real model's weights."""

    def _open(self) -> Coordinator:
        return opened(self.settings.spec, self.folder, clock=self.clock)


def opened(spec: RunSpec, folder: Path, **options: Any) -> Coordinator:
    parts = resolve(spec)
    write_resolved(spec, folder)

    def initial() -> Any:
        return first_weights(spec, parts, folder) if spec.start else parts.model.init(spec.seed)

    return open_coordinator(settings_of(spec, parts), folder / "server", initial, **options)


def bench_of(spec: RunSpec, folder: Path) -> RealBench:
    return RealBench(folder, settings_of(spec, resolve(spec)))


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped run whose newest version is not stored whole, beside where we are."""
    monkeypatch.chdir(tmp_path)
    spec = load(tmp_path, "old")

    async def train() -> None:
        bench = bench_of(spec, tmp_path / "old")
        await bench.join()
        for number in range(5):
            await bench.round(number % 2)
        kill_server(bench.server)

    asyncio.run(train())
    return tmp_path / "old"


@pytest.fixture
def pulled(old: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert diloco(capsys, "pull", old, "--out", "w.safetensors")[0] == 0
    return Path("w.safetensors")


def published(coordinator: Coordinator) -> dict[str, np.ndarray]:
    """The model's tensors in the newest versions."""
    from diloco_cli.core.fragments import scatter

    settings = coordinator.state.settings
    tensors = resolve(settings.spec).model.tensors()
    params = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in tensors}
    for fragment, version in zip(
        settings.layout.fragments, coordinator.state.weights.newest, strict=True
    ):
        scatter(version.state.published, fragment, params)
    return params


@pytest.mark.parametrize("source", ["w.safetensors", "old"])
@pytest.mark.parametrize("fragments", [2, 3])
@in_a_loop
async def test_version_0_is_those_weights_and_their_digest_is_on_record(
    old, pulled, source, fragments
):
    spec = load(Path(), "new", f"start.weights={source}", f"sync.fragments={fragments}")
    server = opened(spec, Path("new"))
    wanted, found = load_file(pulled), published(server)
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    status, summary = build_status(server, ""), build_summary(server)
    assert status.start and status.start == summary.start
    assert status.start.source.startswith(f"{source} (run ") and len(status.start.weights) == 32
    assert all(not version.state.momentum.any() for version in server.state.weights.newest)
    await close_server(server)
    # From here on the source is not needed, and the digest is still known.
    shutil.rmtree(old)
    pulled.unlink()
    again = opened(spec, Path("new"))
    assert build_status(again, "").start == status.start
    await close_server(again)


@in_a_loop
async def test_the_momentum_of_a_run_is_kept_to_the_bit(old):
    spec = load(Path(), "new", "start={weights: old, momentum: keep}")
    server = opened(spec, Path("new"))
    source = opened(load(Path(), "old"), old)
    for ours, theirs in zip(server.state.weights.newest, source.state.weights.newest, strict=True):
        assert np.array_equal(ours.state.momentum, theirs.state.momentum)
        assert theirs.state.momentum.any()
        assert np.array_equal(ours.state.published, theirs.state.published)
    assert build_status(server, "").start.momentum == "keep"  # type: ignore[union-attr]
    await close_server(server)
    await close_server(source)


def test_a_run_that_began_with_weights_is_replayed_from_them(old, capsys):
    spec = load(Path(), "new", "start={weights: old, momentum: keep}")

    async def train() -> None:
        bench = bench_of(spec, Path("new"))
        await bench.join()
        for number in range(4):
            await bench.round(number % 2)
        bench.restart()
        await close_server(bench.server)

    asyncio.run(train())
    shutil.rmtree(old)
    code, out, said = diloco(capsys, "replay", "new")
    assert code == 0, said
    assert "2 versions recomputed from the initial weights" in out
    # A version 0 of other weights, whole in itself, is not the one on record.
    other = opened(load(Path(), "other"), Path("other"))
    asyncio.run(close_server(other))
    shutil.copy("other/server/fragments/0/v00000000.state", "new/server/fragments/0")
    code, _, said = diloco(capsys, "replay", "new")
    assert code == 5 and "Version 0 of fragment 0, stored, has the digest" in said


@in_a_loop
async def test_a_start_that_died_half_way_never_mixes_two_models(old, pulled, monkeypatch):
    from diloco_cli.server.store.run_store import RunStore

    spec = load(Path(), "new", "start.weights=w.safetensors")
    real, stored = RunStore.publish, []

    def dying(self, fragment, *arguments, **named):
        if fragment == 1:
            raise KeyboardInterrupt
        stored.append(real(self, fragment, *arguments, **named))
        return stored[-1]

    monkeypatch.setattr(RunStore, "publish", dying)
    with pytest.raises(KeyboardInterrupt):
        opened(spec, Path("new"))
    monkeypatch.setattr(RunStore, "publish", real)
    changed = {name: values + 1 for name, values in load_file(pulled).items()}
    save_file(changed, pulled)
    server = opened(spec, Path("new"))
    found = published(server)
    assert all(np.array_equal(changed[name], found[name]) for name in changed)
    assert server.state.ledger.begun and server.state.ledger.begun.states[0] != stored[0]
    await close_server(server)


@in_a_loop
async def test_a_version_0_that_is_not_the_one_on_record_is_damage(old, pulled):
    spec = load(Path(), "new", "start.weights=w.safetensors")
    await close_server(opened(spec, Path("new")))
    await close_server(opened(load(Path(), "other"), Path("other")))
    shutil.copy("other/server/fragments/1/v00000000.state", "new/server/fragments/1")
    with pytest.raises(StoreDamaged, match="Version 0 of fragment 1, stored, has the digest"):
        opened(spec, Path("new"))


def test_a_key_that_is_not_used_changes_no_digest(old):
    plain, begun = load(Path(), "new"), load(Path(), "new", "start.weights=w.safetensors")
    assert "start" not in resolved(plain)
    assert shared_digest(plain) == shared_digest(begun), "regions need not know of it"


def test_the_old_server_is_shown_the_operators_credential(tmp_path, monkeypatch):
    operator = tmp_path / "certs" / "admins" / "operator"
    operator.mkdir(parents=True)
    (operator / "token").write_text("operators")
    (operator / "token").chmod(0o600)
    spec = load(tmp_path, "new", f"server.certs={tmp_path / 'certs'}")
    assert for_start(spec).token == "operators"
    monkeypatch.setenv("DILOCO_TOKEN", "mine")
    assert for_start(spec).token == "mine"
    assert for_start(load(tmp_path, "new")).token == "mine"


def edited(change: Any) -> None:
    tensors = load_file("w.safetensors")
    save_file(change(tensors) or tensors, "w.safetensors", metadata={"run": "r"})


def without_norm(tensors: dict[str, np.ndarray]) -> None:
    del tensors["norm"]


def wider(tensors: dict[str, np.ndarray]) -> None:
    tensors["norm"] = np.zeros(64, np.float32)


def with_bias(tensors: dict[str, np.ndarray]) -> None:
    tensors["bias"] = np.zeros((2, 3), np.float32)


def halved(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values.astype(np.float16) for name, values in tensors.items()}


def spoiled(tensors: dict[str, np.ndarray]) -> None:
    tensors["embed"][3, 5] = np.nan


WRONG = [
    (without_norm, 2, ["does not fit the model", "norm [32] is missing", "hint: Is `model`"]),
    (wider, 2, ["norm has the shape [64], the model's [32]"]),
    (with_bias, 2, ["bias [2, 3] is no tensor of the model"]),
    (halved, 2, ["has the dtype F16, a run is begun with F32", "hint: Write them as float32"]),
    (spoiled, 2, ["embed[3, 5] in w.safetensors is nan", "hint: Begin with weights from before"]),
]


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize("change, code, said", WRONG, ids=[each[0].__name__ for each in WRONG])
def test_what_does_not_fit_is_refused_with_names_and_values(
    old, pulled, capsys, command, change, code, said
):
    edited(change)
    load(Path(), "new")
    given, _, told = diloco(capsys, command, "new.yaml", "--set", "start.weights=w.safetensors")
    assert given == code, told
    for words in said:
        assert words in told
    assert "Traceback" not in told and not list(Path("runs/new").glob("server/fragments/*/*"))


def cut_short() -> str:
    Path("w.safetensors").write_bytes(Path("w.safetensors").read_bytes()[:-100])
    return "w.safetensors"


def no_tensors() -> str:
    Path("w.txt").write_text("not weights at all")
    return "w.txt"


def damaged_run() -> str:
    journal = Path("old/server/journal")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    return "old"


SOURCES = [
    (lambda: "nowhere.safetensors", 2, "there is no nowhere.safetensors in"),
    (cut_short, 3, "w.safetensors is not a whole safetensors file"),
    (no_tensors, 3, "w.txt is not a whole safetensors file"),
    (damaged_run, 5, "is damaged"),
    (lambda: ".", 2, ". is a folder without a run: it has no spec.resolved.yaml"),
    (lambda: "runs/new", 2, "runs/new is the folder of this very run"),
    (lambda: "http://127.0.0.1:9", 4, "127.0.0.1:9"),
]


@pytest.mark.parametrize("make, code, said", SOURCES)
def test_a_source_that_cannot_be_read_says_so(old, pulled, capsys, make, code, said):
    Path("runs/new").mkdir(parents=True)
    load(Path(), "new")
    given, _, told = diloco(capsys, "serve", "new.yaml", "--set", f"start.weights={make()}")
    assert (given, "Traceback" in told) == (code, False), told
    assert said in told and "hint:" in told


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["start.weights=w.safetensors"], "w.safetensors is a file, and files hold weights only"),
        (["start.weights=http://127.0.0.1:9"], "a server gives weights only"),
        (["start.weights=old", "sync.fragments=3"], "sync.fragments is 2 in old and 3 here"),
        (["start.weights=old", "outer={kind: sgd}"], "outer.kind is nesterov in old and sgd here"),
    ],
)
def test_momentum_that_has_no_meaning_here_is_refused(old, pulled, capsys, overrides, said):
    load(Path(), "new")
    given = [word for each in [*overrides, "start.momentum=keep"] for word in ("--set", each)]
    code, _, told = diloco(capsys, "serve", "new.yaml", *given)
    assert code == 2 and said in told and "hint:" in told


@in_a_loop
async def test_a_run_that_goes_on_meanwhile_can_be_begun_from(old):
    """Its server holds the folder: it is only read, and what is read is one state of it."""
    source = opened(load(Path(), "old"), old)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    server = opened(load(Path(), "new", "start={weights: old, momentum: keep}"), Path("new"))
    theirs = published(source)
    assert all(np.array_equal(theirs[name], each) for name, each in published(server).items())
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    await close_server(server)
    await close_server(source)


def test_the_summary_is_a_document_of_the_same_keys_without_it(old):
    server = opened(load(Path(), "old"), old)
    assert "start" not in json.dumps(build_summary(server).plain())
    with pytest.raises(SpecError):
        write_resolved(load(Path(), "old", "start.weights=w.safetensors"), old)
    asyncio.run(close_server(server))
