"""Look before starting: text, disk, memory and devices, by `run`, `work` and `doctor` alike."""

import gzip
import hashlib
import json
import os
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from diloco_cli.assemble import load_run
from diloco_cli.cli.app import app
from diloco_cli.data.prepare import prepare
from diloco_cli.errors import SpecError
from diloco_cli.run.doctor.before_start import accelerators, before_start, refuse_unready
from tests.cli.harness import SPEC, diloco
from tests.data.corpora import documents, preparation, write_lines, write_tokenizer


def write_spec(folder: Path, data: str, name: str = "run.yaml") -> Path:
    folder.mkdir(exist_ok=True)
    text = SPEC.replace("data: {kind: python-source}", f"data: {{kind: text, {data}}}")
    (folder / name).write_text(text)
    return folder / name


def write_corpus(folder: Path, sizes: dict[str, int]) -> None:
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name).write_text("All work and no play. " * (size // 22))


def looked(spec_file: Path, folder: Path, environment=None, **more) -> list[str]:
    spec = load_run(spec_file).spec
    regions = [region.name for region in spec.regions]
    checks = before_start(spec, folder, regions, environment or {}, serves=True, **more)
    return refuse_unready(checks)


@pytest.mark.parametrize(
    "files, said, hint",
    [
        ("corpus", "'corpus' is a folder, not a file", "corpus/* means the files in it"),
        ("corpse/*.txt", "no file matches 'corpse/*.txt' in", "relative to the folder of the spec"),
        ("packed/*.txt", "is not text: it is compressed with gzip", "gunzip"),
    ],
)
def test_text_that_cannot_be_read_is_refused_before_anything_is_started(
    tmp_path, capsys, files, said, hint
):
    write_corpus(tmp_path / "corpus", {"a.txt": 40_000})
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.txt").write_bytes(gzip.compress(b"text" * 10_000))
    spec = write_spec(tmp_path, f"files: ['{files}']")
    home = tmp_path / "runs" / "tiny"
    code, _, told = diloco(capsys, "run", spec)
    assert code == 2 and said in told and hint in told and not home.exists()
    result = CliRunner().invoke(app, ["doctor", str(spec)])
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert result.exit_code == 1 and any("data" in line and said in line for line in failed)


def test_a_fresh_start_that_is_refused_moves_nothing(tmp_path, capsys):
    spec = write_spec(tmp_path, "files: [corpse]")
    home = tmp_path / "runs" / "tiny"
    home.mkdir(parents=True)
    (home / "spec.resolved.yaml").write_text("")
    assert diloco(capsys, "run", spec, "--fresh")[0] == 2
    assert [path.name for path in home.parent.iterdir()] == ["tiny"]


def test_paths_are_relative_to_the_spec_and_not_to_the_shell(tmp_path, monkeypatch, capsys):
    write_corpus(tmp_path / "my-run" / "corpus", {"a.txt": 40_000})
    write_spec(tmp_path / "my-run", "files: ['corpus/*']")
    monkeypatch.chdir(tmp_path)
    code, told, _ = diloco(capsys, "validate", "my-run/run.yaml")
    assert code == 0 and "the end of 1 file" in told
    assert os.getcwd() == str(tmp_path)


def test_one_file_that_is_most_of_the_held_out_text_is_named(tmp_path):
    # Which files are set apart follows from the digests of their names.
    names = sorted(
        (f"{number}.txt" for number in range(60)),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    write_corpus(tmp_path / "corpus", {name: 2_000 for name in names} | {names[0]: 5_000})
    spec = write_spec(tmp_path, f"files: ['{tmp_path}/corpus/*'], heldout: 0.08")
    (warning,) = looked(spec, tmp_path / "none")
    assert warning.startswith("56% of the held-out text is " + names[0])


def test_json_lines_as_text_are_warned_of(tmp_path):
    write_corpus(tmp_path / "corpus", {"a.jsonl": 40_000})
    spec = write_spec(tmp_path, f"files: ['{tmp_path}/corpus/*']")
    (warning,) = looked(spec, tmp_path / "none")
    assert "a.jsonl is read as it is" in warning and "kind: jsonl" in warning


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\x01\x02\0\x03" * 10_000, "looks like a binary file. It is trained on byte by byte"),
        ("Alles Gute. ".encode("utf-16") * 4_000, "looks like text in UTF-16. Convert it: `iconv"),
    ],
)
def test_bytes_that_hardly_are_text_are_warned_of(tmp_path, content, said):
    write_corpus(tmp_path / "corpus", {f"{number}.txt": 40_000 for number in range(4)})
    (tmp_path / "corpus" / "z.dat").write_bytes(content)
    spec = write_spec(tmp_path, f"files: ['{tmp_path}/corpus/*'], heldout: 0.2")
    (warning,) = looked(spec, tmp_path / "none")
    assert f"z.dat {said}" in warning


@pytest.mark.parametrize(
    "line, more, said",
    [
        ('{"text": "a', "", "c.jsonl, line 3: not JSON"),
        ('{"text": "a"}', ", field: words", "no field 'words'"),
    ],
)
def test_json_lines_are_sampled_before_anything_is_started(tmp_path, capsys, line, more, said):
    spec = write_documents(tmp_path, [], more)
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n' + f"{line}\n" * 50)
    code, _, told = diloco(capsys, "run", spec)
    assert code == 2 and said in told and not (tmp_path / "runs").exists()


def write_documents(folder: Path, texts: list[str], more: str = "") -> Path:
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_tokenizer(folder, name="t.json")
    text = SPEC.replace("heads: 2", "heads: 2, vocabulary: 320")
    data = f"{{kind: jsonl, files: [c.jsonl], tokenizer: {{kind: hf, file: t.json}}{more}}}"
    (folder / "run.yaml").write_text(text.replace("{kind: python-source}", data))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    "texts, more, said, hint",
    [
        (
            ["All work and no play. " * 20] * 400,
            "",
            "all 400 documents are alike, so all are trained on and none is held out",
            "follows from their text alone",
        ),
        (
            ["All work and no play. " * 20] * 400,
            ", heldout: 0.9999999",
            "all 400 documents are alike, so all are held out and none is trained on",
            "follows from their text alone",
        ),
        (
            documents(400),
            ", heldout: 0.000001",
            "held-out part has 0 tokens",
            "raise `data.heldout`",
        ),
        (documents(40), ", heldout: 0.5", "too few for 64 lanes", "lower `data.lanes`"),
    ],
)
def test_documents_of_which_too_little_is_held_out_or_left_are_found_before_the_start(
    tmp_path, capsys, texts, more, said, hint
):
    spec = write_documents(tmp_path, texts, more)
    code, _, told = diloco(capsys, "run", spec)
    assert code == 2 and said in told and hint in told and not (tmp_path / "runs").exists()


def test_documents_that_are_enough_are_read_no_further_than_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = documents(4000)
    spec = write_documents(tmp_path, texts)
    assert looked(spec, tmp_path / "none") == []
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write("not JSON, which whoever reads this far would find\n")
    assert looked(spec, tmp_path / "none") == []


@pytest.mark.parametrize(
    "sizes, more, said",
    [
        ({"a.txt": 600}, "lanes: 4", "the held-out part has 30 tokens, one sequence takes 33"),
        ({"a.txt": 1_980}, "heldout: 0.1", "1782 tokens to train on are too few for 64 lanes"),
    ],
)
def test_text_that_is_too_short_is_found_before_the_start(tmp_path, capsys, sizes, more, said):
    write_corpus(tmp_path / "corpus", sizes)
    spec = write_spec(tmp_path, f"files: ['corpus/*'], {more}")
    code, _, told = diloco(capsys, "run", spec)
    assert code == 2 and said in told and not (tmp_path / "runs").exists()


def test_text_must_be_enough_for_the_longest_sequence_of_a_region(tmp_path, capsys):
    write_corpus(tmp_path / "corpus", {"a.txt": 20_000})
    spec = write_spec(tmp_path, "files: ['corpus/*']")
    longer = "{name: right, inner: {batch: 1, sequence: 512}}"
    spec.write_text(spec.read_text().replace("{name: right}", longer))
    code, _, told = diloco(capsys, "run", spec)
    assert code == 2 and "too few for 64 lanes with sequences of 512" in told
    assert not (tmp_path / "runs").exists()


def test_prepared_tokens_without_a_held_out_part_are_found_before_the_start(tmp_path, capsys):
    write_lines(tmp_path / "docs" / "c.jsonl", ["All work and no play. " * 20] * 400)
    prepare(preparation(tmp_path / "docs", tmp_path / "tokens"))
    text = SPEC.replace("heads: 2", "heads: 2, vocabulary: 320")
    spec = tmp_path / "run.yaml"
    spec.write_text(text.replace("{kind: python-source}", "{kind: tokens, folder: tokens}"))
    code, _, told = diloco(capsys, "run", spec)
    assert code == 2 and "the held-out part has 0 tokens" in told
    assert not (tmp_path / "runs").exists()


def test_a_disk_without_the_reserve_is_refused_unless_the_run_has_begun(tmp_path):
    write_corpus(tmp_path / "corpus", {"a.txt": 40_000})
    spec = write_spec(tmp_path, f"files: ['{tmp_path}/corpus/*']")
    spec.write_text(spec.read_text() + "server: {store: {kind: folder, reserve: 1e16}}\n")
    with pytest.raises(SpecError, match="no contribution is taken with less than") as refused:
        looked(spec, tmp_path / "none")
    assert "server.store.reserve" in (refused.value.hint or "")
    (tmp_path / "begun" / "server").mkdir(parents=True)
    (tmp_path / "begun" / "server" / "journal").touch()
    assert any("no contribution is taken" in told for told in looked(spec, tmp_path / "begun"))


def test_memory_counts_the_processes_themselves(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus", {"a.txt": 40_000})
    spec = write_spec(tmp_path, f"files: ['{tmp_path}/corpus/*']")
    free = psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    (warning,) = looked(spec, tmp_path / "none")
    assert "1.0 GB are free, 2 regions and the server need about 1.8" in warning


def test_devices_that_nobody_uses_are_counted(tmp_path):
    write_corpus(tmp_path / "corpus", {"a.txt": 40_000})
    spec = write_spec(tmp_path, f"files: ['{tmp_path}/corpus/*']")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}
    (warning,) = looked(spec, tmp_path / "none", flags)
    assert "5 devices are here, 2 asked for: 3 will stand idle" in warning
    assert accelerators({}) is None or accelerators({})


def test_a_projects_runs_lie_beside_its_spec_whoever_starts_them(tmp_path, monkeypatch, capsys):
    from diloco_cli.run.folder import SpecPlace, find

    write_spec(tmp_path / "my-run", "files: [a]")
    other = write_spec(tmp_path / "specs", "files: [a]", "other.yaml")
    home = tmp_path / "my-run" / "runs" / "tiny"
    home.mkdir(parents=True)
    (home / "spec.resolved.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    for target in ("my-run", "my-run/run.yaml", "my-run/runs/tiny/spec.resolved.yaml"):
        folder = find(target).folder
        assert folder is not None and folder.resolve() == home
    try:
        assert SpecPlace(Path("my-run/run.yaml")).run_folder("tiny").resolve() == home
        os.chdir(tmp_path)
        place = SpecPlace(other)
        assert place.run_folder("tiny") == tmp_path / "runs" / "tiny"
        assert place.path(Path("certs")) == tmp_path / "certs"
    finally:
        os.chdir(tmp_path)
