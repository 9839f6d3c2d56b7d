"""Text becomes the same folder of tokens every time, whatever interrupts it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.data.hf_tokenizer import open_tokenizer
from diloco_cli.data.prepare import prepare
from diloco_cli.data.token_folder import (
    TokenManifest,
    check_digests,
    document_ends,
    heldout_list,
    open_shards,
)
from diloco_cli.data.tokens import open_folder
from diloco_cli.errors import SpecError, StoreError
from tests.cli.harness import diloco
from tests.data import corpora


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with documents in every form."""
    folder = tmp_path / "in"
    corpora.write_lines(folder / "a.jsonl", corpora.documents(40))
    corpora.write_lines(folder / "b.jsonl.gz", corpora.documents(30, 40))
    corpora.write_lines(folder / "c.jsonl.zst", corpora.documents(30, 70))
    corpora.write_table(folder / "d.parquet", corpora.documents(30, 100))
    corpora.write_table(folder / "e.arrow", corpora.documents(30, 130))
    for number, text in enumerate(corpora.documents(40, 160)):
        (folder / f"f{number:02d}.txt").write_text(text)
    return folder


what = corpora.preparation


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_every_document_is_in_one_shard_in_turn_and_ends_with_the_separator(texts: Path, tmp_path):
    asked = what(texts, tmp_path / "out")
    manifest = prepare(asked)
    decode = asked.tokenizer.library.decode
    pieces, apart = open_shards(asked.out, manifest)
    found: list[list[str]] = []
    for shard, tokens in zip((*manifest.shards, manifest.heldout), (*pieces, apart), strict=True):
        ends = document_ends(asked.out, shard)
        assert len(ends) == shard.documents and ends[-1] == shard.tokens == tokens.size
        parts = np.split(np.asarray(tokens), ends[:-1].astype(int))
        assert all(part[-1] == 0 and 0 not in part[:-1] for part in parts)
        found.append([decode(part[:-1].tolist()) for part in parts])
    *trained, held = found
    ends = document_ends(asked.out, manifest.heldout)
    in_turn = [trained[n % 3][n // 3] for n in range(sum(map(len, trained)))]
    everything = corpora.documents(200)
    assert in_turn == [text for text in everything if text not in held]
    assert len(held) + len(in_turn) == 200 and 5 < len(held) < 45
    assert [source.documents for source in manifest.sources] == [40, 30, 30, 30, 30, *[1] * 40]
    assert sum(source.tokens for source in manifest.sources) == manifest.tokens + apart.size
    listed = list(heldout_list(asked.out))
    assert [entry["tokens"] for entry in listed] == np.diff(ends, prepend=np.uint64(0)).tolist()
    by_source = {"a.jsonl": 0, "b.jsonl.gz": 40, "c.jsonl.zst": 70, "d.parquet": 100}
    for entry, text in zip(listed, held, strict=True):
        if entry["source"] in by_source:
            assert everything[by_source[entry["source"]] + entry["document"]] == text


def test_the_bytes_depend_on_the_documents_not_on_batches(texts: Path, tmp_path: Path):
    first = prepare(what(texts, tmp_path / "one"))
    second = prepare(what(texts, tmp_path / "two", letters=1 << 20, flush_every=10))
    assert first == second and content(tmp_path / "one") == content(tmp_path / "two")


def test_what_is_held_out_depends_on_the_text_alone(texts: Path, tmp_path: Path):
    shutil.copy(texts / "a.jsonl", texts / "z.jsonl")
    manifest = prepare(what(texts, tmp_path / "out"))
    listed = list(heldout_list(tmp_path / "out"))
    by_source = {
        name: [entry["document"] for entry in listed if entry["source"] == name]
        for name in ("a.jsonl", "z.jsonl")
    }
    assert by_source["a.jsonl"] == by_source["z.jsonl"] != []
    assert manifest.heldout.documents == len(listed)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.data.corpora import preparation
from diloco_cli.data.prepare import prepare
calls = 0
def report(reached):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
every = float(sys.argv[4])
prepare(preparation(Path(sys.argv[1]), Path(sys.argv[2]), flush_every=every), report)
"""


# Two processes that import everything: seconds of work, minutes where sixty others want the cores.
@pytest.mark.timeout(900)
def test_killed_and_resumed_it_makes_the_same_bytes(texts: Path, tmp_path: Path):
    whole = prepare(what(texts, tmp_path / "whole"))
    out = tmp_path / "killed"
    # Flushed after every batch; in the middle of much that is not flushed.
    for batches, every in ((3, 0), (9, 1e9)):
        arguments = [sys.executable, "-c", KILLED, texts, out, batches, every]
        ended = subprocess.run([*map(str, arguments)], capture_output=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert (out / "progress.json").exists() and not (out / "manifest.json").exists()
    reached = json.loads((out / "progress.json").read_bytes())
    assert 0 < reached["source"] < 45
    # Written after the last flush, and on the disk all the same.
    for path in (*out.glob("*.bin"), *out.glob("*.idx"), out / "heldout.jsonl"):
        path.write_bytes(path.read_bytes() + b"more than progress.json knows of")
    assert prepare(what(texts, out)) == whole
    assert content(out) == content(tmp_path / "whole")


def test_killed_as_its_last_step_it_is_finished_by_the_next_call(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, out, remove = prepare(what(texts, tmp_path / "whole")), tmp_path / "killed", os.unlink

    def die(path: Path, **options: int) -> None:
        if Path(path).name == "progress.json":
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "unlink", die)
        prepare(what(texts, out))
    with pytest.raises(SpecError, match="is not finished") as told:
        open_folder(out, 0.1)
    assert "the same `diloco data prepare` again" in (told.value.hint or "")
    assert prepare(what(texts, out)) == whole
    assert open_folder(out, 0.1).digest == whole.digest


def test_a_finished_folder_is_checked_not_made_again(texts: Path, tmp_path: Path):
    asked = what(texts, tmp_path / "out")
    manifest = prepare(asked)
    before = os.stat(tmp_path / "out" / "00000.bin").st_mtime_ns
    assert prepare(asked) == manifest
    assert os.stat(tmp_path / "out" / "00000.bin").st_mtime_ns == before
    with pytest.raises(SpecError, match="was begun with shards 3, not with 4"):
        prepare(what(texts, tmp_path / "out", shards=4))
    (texts / "more.txt").write_text("more")
    with pytest.raises(SpecError, match="was prepared from other files"):
        prepare(what(texts, tmp_path / "out"))


def test_an_unfinished_folder_goes_on_with_the_same_files_only(texts: Path, tmp_path: Path):
    def stop(reached):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(what(texts, tmp_path / "out", letters=1 << 20, flush_every=0), stop)
    os.utime(texts / "a.jsonl", (1, 1))
    with pytest.raises(SpecError, match=r"begun with another .*/a\.jsonl, all of which is in it"):
        prepare(what(texts, tmp_path / "out"))


def test_a_file_that_was_bad_is_mended_and_nothing_else_read_again(texts: Path, tmp_path: Path):
    whole = prepare(what(texts, tmp_path / "whole"))
    path = texts / "b2.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in "abcdef") + '{"txt": "g"}\n')
    with pytest.raises(SpecError, match=r"b2.jsonl, line 7: there is no field"):
        prepare(what(texts, tmp_path / "out", letters=3, flush_every=0))
    reached = json.loads((tmp_path / "out" / "progress.json").read_bytes())
    assert reached["source"] == 2 and 0 < reached["document"] < 7
    path.unlink()
    assert prepare(what(texts, tmp_path / "out")) == whole
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_damaged_folder_is_refused(texts: Path, tmp_path: Path):
    asked = what(texts, tmp_path / "out")
    manifest = prepare(asked)
    shard = tmp_path / "out" / "00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(StoreError, match=r"00001.bin is damaged: it has .* bytes, the manifest"):
        open_shards(asked.out, manifest)
    shard.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
    for look in (open_shards, check_digests):
        with pytest.raises(StoreError, match=r"00001.bin is damaged: its digest is"):
            look(asked.out, manifest)
    shard.unlink()
    with pytest.raises(StoreError, match=r"00001.bin cannot be read"):
        open_shards(asked.out, manifest)
    path = tmp_path / "out" / "manifest.json"
    said = json.loads(path.read_bytes())
    said["shards"][0]["digest"] = "0" * 32
    path.write_text(json.dumps(said))
    with pytest.raises(StoreError, match="its digest is"):
        TokenManifest.read(tmp_path / "out")


def test_a_folder_of_other_things_is_left_alone(texts: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.docx").write_text("precious")
    with pytest.raises(SpecError, match=r"holds other files, thesis.docx for one"):
        prepare(what(texts, tmp_path / "out"))
    assert (tmp_path / "out" / "thesis.docx").read_text() == "precious"


def test_the_command_prepares_says_what_it_made_and_refuses_damage(texts, tmp_path, capsys):
    tokenizer = corpora.write_tokenizer(tmp_path)
    ask = ("data", "prepare", texts, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    ask = (*ask, "--heldout", 0.1, "--begin", "!")
    code, out, _ = diloco(capsys, *ask, "--format", "json")
    said = json.loads(out)
    assert code == 0 and said["documents"] + said["heldout"]["documents"] == 200
    assert np.fromfile(tmp_path / "out" / "00000.bin", "<u2")[0] == open_tokenizer(
        tokenizer
    ).number("!")
    code, out, _ = diloco(capsys, *ask)
    assert code == 0 and f"digest    {said['digest'][:12]}" in out
    (tmp_path / "out" / "00003.bin").write_bytes(b"")
    code, _, err = diloco(capsys, *ask)
    assert code == 5 and "00003.bin is damaged" in err and "hint:" in err


@pytest.mark.parametrize(
    "change, said",
    [
        (("--heldout", "1.5"), "must be between 0 and 1"),
        (("--separator", "<stop>"), "has no token '<stop>'"),
        (("--field", "body"), "there is no field 'body'; fields with text are: text"),
        (("--tokenizer", "/none.json"), "cannot be read: No such file"),
    ],
)
def test_bad_arguments_are_exit_code_2(texts, tmp_path, capsys, change, said):
    tokenizer = corpora.write_tokenizer(tmp_path)
    ask = ("data", "prepare", texts, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    code, _, err = diloco(capsys, *ask, *change)
    assert code == 2 and said in err and "hint:" in err
    assert not (tmp_path / "out" / "manifest.json").exists()
