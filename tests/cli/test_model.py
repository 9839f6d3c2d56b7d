"""`diloco export`, `generate`, `evaluate`: from a run, from its files, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_cli.assemble import load_run, resolve, shared_digest
from tests.cli.harness import SPEC, diloco, trained

PROMPT = ("--prompt", "def ", "--tokens", 12)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it that had some rounds."""
    place = tmp_path_factory.mktemp("made")
    trained(place, [0, 1, 0, 1])
    return place


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_a_run_its_pulled_file_and_its_exported_folder_are_one_model(capsys, run):
    assert diloco(capsys, "pull", run, "--out", "w.safetensors")[0] == 0
    assert diloco(capsys, "export", run, "--out", "hf")[0] == 0
    said = {diloco(capsys, "generate", each, *PROMPT)[:2] for each in (run, "w.safetensors", "hf")}
    assert len(said) == 1
    ((code, text),) = said
    assert code == 0 and text.startswith("def ")
    other = diloco(capsys, "generate", run, *PROMPT, "--seed", 1)[1]
    first = diloco(capsys, "generate", run, *PROMPT, "--version", 0)[1]
    assert len({text, other, first}) == 3

    losses = []
    for each in ("w.safetensors", "hf"):
        Path("some.txt").write_text("import this\n" * 9)
        code, out, _ = diloco(capsys, "evaluate", each, "--data", "some.txt", "--format", "json")
        assert code == 0 and json.loads(out)["tokens"] == 12 * 9 - 1
        losses.append(json.loads(out)["loss"])
    assert losses[0] == losses[1] == pytest.approx(np.log(256), abs=1.5)
    assert "nats per token" in diloco(capsys, "evaluate", run)[1]


def test_so_many_batches_are_measured_as_were_asked_for(capsys, run):
    def tokens(*options: object) -> int:
        code, out, _ = diloco(capsys, "evaluate", run, *options, "--format", "json")
        assert code == 0
        return json.loads(out)["tokens"]

    assert tokens() == 8 * 2 * 32
    assert tokens("--batches", 3) == 3 * 2 * 32
    dataset = ("--data", "{kind: python-source}")
    assert (tokens(*dataset), tokens(*dataset, "--batches", 3)) == (8 * 8 * 32, 3 * 8 * 32)
    Path("some.txt").write_text("import this\n" * 9)
    for other in (("--data", "some.txt"), ("--harness", "hellaswag")):
        code, _, said = diloco(capsys, "evaluate", run, *other, "--batches", 3)
        assert code == 2 and "--batches is for held-out text" in said and "hint:" in said


def test_an_exported_folder_has_what_others_look_for(capsys, run):
    code, out, _ = diloco(capsys, "export", run, "--out", "hf", "--dtype", "bfloat16")
    assert code == 0 and out.strip() == "hf"
    config = json.loads(Path("hf/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    card = Path("hf/README.md").read_text()
    assert "tiny" in card and "versions of its fragments | [2, 2]" in card
    assert len(json.loads(Path("hf/tokenizer.json").read_text())["model"]["vocab"]) == 256
    code, _, said = diloco(capsys, "export", run, "--out", "hf")
    assert code == 2 and "hf exists already" in said
    assert not list(Path().glob(".hf*"))


def test_the_card_of_an_average_has_the_loss_of_the_average(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SPEC + "outer: {kind: nesterov, ema: 0.5}\n"
    run = trained(tmp_path, [0, 1, 0, 1], text + "server: {store: {kind: folder, whole: 1}}\n")
    losses = {"first": 5.7, "heldout": 1.835, "heldout_at": 4, "ema": 1.8402, "ema_at": 4}

    def card(*options: object, **changed: object) -> str:
        summary = {"state": "finished", "loss": {**losses, **changed}}
        (run / "summary.json").write_text(json.dumps(summary))
        shutil.rmtree("hf", ignore_errors=True)
        assert diloco(capsys, "export", *options, "--out", "hf")[0] == 0
        return Path("hf/README.md").read_text()

    average = card(run, "--ema")
    assert "are the average of the last versions" in average and "1.8350" not in average
    assert "| held-out loss of these weights | 1.8402 nats per token |" in average
    plain = card(run)
    assert "average" not in plain and "1.8402" not in plain
    assert "| held-out loss of these weights | 1.8350 nats per token |" in plain
    # What was measured of others is not passed off as the loss of these.
    assert "loss of the average at outer step 2 | 1.8402" in card(run, "--ema", ema_at=2)
    assert "loss of the run at outer step 4 | 1.8350" in card(run, "--version", 1)
    diloco(capsys, "pull", run, "--ema", "--out", "average.safetensors")
    assert "are the average of the last versions" in card("average.safetensors")


def test_versions_that_can_be_had_are_named_the_first_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = SPEC + "server: {store: {kind: folder, whole: 1, history: 2}}\n"
    run = trained(tmp_path, [0, 1] * 5, few)
    for command in (("pull", run), ("generate", run, *PROMPT)):
        code, _, said = diloco(capsys, *command, "--version", 2)
        assert code == 2 and "versions 0, which the seed makes again, and 4 to 5 are." in said
    assert diloco(capsys, "generate", run, *PROMPT, "--version", 0)[0] == 0
    code, _, said = diloco(capsys, "pull", run, "--version", 0, "--out", "first.safetensors")
    assert code == 0 and "versions [0, 0] of run " in said and "unknown" not in said
    first = resolve(load_run(run / "spec.resolved.yaml").spec).model.init(0)
    pulled = load_file("first.safetensors")
    assert all(np.array_equal(pulled[name], values) for name, values in first.items())
    assert diloco(capsys, "generate", "first.safetensors", *PROMPT)[0] == 0


def test_a_pulled_file_says_which_model_it_is_of(capsys, run):
    diloco(capsys, "pull", run, "--out", "w.safetensors")
    weights = load_file("w.safetensors")
    save_file(weights, "bare.safetensors")
    code, _, said = diloco(capsys, "generate", "bare.safetensors", *PROMPT)
    assert code == 2 and "does not say which model" in said and "hint:" in said


IMPORT = SPEC.replace("{kind: decoder, layers: 1, width: 32, heads: 2}", "{kind: hf, folder: hf}")


def test_a_run_begins_with_an_imported_model_and_needs_its_folder_once(capsys, run, tmp_path):
    diloco(capsys, "export", run, "--out", "hf")
    Path("run.yaml").write_text(IMPORT)
    spec = load_run("run.yaml").spec
    shutil.copytree("hf", "elsewhere")
    elsewhere = load_run("run.yaml", ["model.folder=elsewhere"]).spec
    assert shared_digest(spec) == shared_digest(elsewhere)
    diloco(capsys, "pull", run, "--out", "w.safetensors")
    (tmp_path / "second").mkdir()
    second = trained(tmp_path / "second", [], IMPORT)
    shutil.rmtree("hf")  # Version 0 is in the server's folder, the architecture in the spec.
    assert diloco(capsys, "pull", second, "--out", "again.safetensors")[0] == 0
    wanted, found = load_file("w.safetensors"), load_file("again.safetensors")
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_weights_of_a_folder_begin_a_run_of_that_model_only(capsys, run):
    from diloco_cli.run.first_weights import check_first_weights, first_weights

    diloco(capsys, "export", run, "--out", "hf")
    Path("run.yaml").write_text(SPEC + "start: {weights: hf}\n")
    spec = load_run("run.yaml").spec
    check_first_weights(spec, Path("new"))
    first = first_weights(spec, resolve(spec), Path("new"))
    diloco(capsys, "pull", run, "--out", "w.safetensors")
    assert all(np.array_equal(first.params[k], v) for k, v in load_file("w.safetensors").items())
    Path("run.yaml").write_text(SPEC.replace("layers: 1", "layers: 2") + "start: {weights: hf}\n")
    code, _, said = diloco(capsys, "run", "run.yaml", "--dir", "new")
    assert code == 2 and "layers is 1 there and 2 here" in said and "kind: hf" in said


def _config(**changes: object) -> None:
    path = Path("hf/config.json")
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: each for key, each in config.items() if each != "gone"}))


def _tensors(change: str) -> None:
    path = "hf/model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "shape":
        weights[name] = np.ascontiguousarray(weights[name].T)
    else:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, path, metadata={"format": "pt"})


def _damage() -> None:
    data = Path("hf/model.safetensors").read_bytes()
    Path("hf/model.safetensors").write_bytes(data[:-100])


WRONG = {
    "a tensor is missing": (lambda: _tensors("missing"), 2, "mlp.up_proj.weight is missing"),
    "another shape": (lambda: _tensors("shape"), 2, "has the shape [32, 128], wanted is [128, 32]"),
    "tied and not tied": (lambda: _tensors("tied"), 2, "lm_head.weight differs from the embedding"),
    "untied without output": (
        lambda: _config(tie_word_embeddings=False),
        2,
        "lm_head.weight is missing",
    ),
    "unknown architecture": (
        lambda: _config(model_type="mamba", architectures=["MambaForCausalLM"]),
        2,
        "model_type 'mamba' (MambaForCausalLM)",
    ),
    "a key is missing": (lambda: _config(hidden_size="gone"), 2, "has no 'hidden_size'"),
    "another activation": (lambda: _config(hidden_act="relu"), 2, "hidden_act 'relu'"),
    "a sliding window": (lambda: _config(use_sliding_window=True), 2, "use_sliding_window True"),
    "damaged weights": (_damage, 3, "is not a whole safetensors file"),
    "no weights": (lambda: Path("hf/model.safetensors").unlink(), 2, "has no weights"),
    "no JSON": (lambda: Path("hf/config.json").write_text("{"), 2, "config.json is not JSON"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_folder_is_said_before_anything_starts(capsys, run, wrong):
    spoil, wanted, words = WRONG[wrong]
    diloco(capsys, "export", run, "--out", "hf")
    spoil()
    Path("run.yaml").write_text(IMPORT)
    for command in (
        ("run", "run.yaml", "--dir", "new"),
        ("generate", "hf", *PROMPT),
    ):
        code, out, said = diloco(capsys, *command)
        assert (code, out) == (wanted, ""), said
        assert words in said and "Traceback" not in said
        assert "hint:" in said
    assert not (Path("new") / "server").exists()
