"""A tokenizer from a file means the same text everywhere, and is known by its digest."""

import json
from pathlib import Path

import numpy as np
import pytest

from diloco_cli import assemble
from diloco_cli.data import datasets, tokenizers
from diloco_cli.data.hf_tokenizer import OpenTokenizer, open_tokenizer, pieces, train_tokenizer
from diloco_cli.errors import RegistryError, SpecError
from diloco_cli.spec.load import SpecErrors
from tests.cli.harness import SPEC, diloco
from tests.data import corpora


@pytest.fixture
def opened(tmp_path: Path) -> OpenTokenizer:
    return open_tokenizer(corpora.write_tokenizer(tmp_path))


def test_text_becomes_tokens_and_text_again(opened: OpenTokenizer):
    texts = [*corpora.documents(5), "etwas völlig → anderes 文\n\n\t\x01", ""]
    tokens = list(opened.encode(texts))
    assert [opened.library.decode(each.tolist()) for each in tokens] == texts
    assert {each.dtype for each in tokens} == {np.dtype("<u2")}


def test_a_separator_spelled_out_in_a_text_ends_no_document(opened: OpenTokenizer):
    (tokens,) = opened.encode(["before <|endoftext|> after"])
    assert opened.separator == 0 and 0 not in tokens.tolist()


def test_long_texts_are_cut_where_it_makes_no_difference():
    text = "\n\n".join(f"{text}\n  indented\nplain\n" for text in corpora.documents(30))
    # One that has tokens of several spaces and line ends.
    library = train_tokenizer([text] * 9, 600)
    for size in range(90, 110):
        cut = pieces(text, size)
        assert len(cut) > 5 and "".join(cut) == text
        whole = library.encode(text).ids
        assert [number for piece in cut for number in library.encode(piece).ids] == whole
    assert pieces("no end of line " * 100, 100) == ["no end of line " * 100]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "vocab.json").write_text('{"a": 1}')
    with pytest.raises(SpecError, match="is not a tokenizer"):
        open_tokenizer(tmp_path / "vocab.json")
    with pytest.raises(SpecError, match="No such file"):
        open_tokenizer(tmp_path / "none.json")


def test_the_digest_is_found_out_and_held_to(tmp_path: Path):
    path = corpora.write_tokenizer(tmp_path)
    asked = {"kind": "hf", "file": str(path)}
    text = datasets.build({"kind": "text", "files": ["a"], "tokenizer": asked})
    digest = getattr(text, "tokenizer")["digest"]  # noqa: B009
    assert len(digest) == 64 and text.vocabulary == 320
    assert tokenizers.build({**asked, "digest": digest}).vocabulary == 320
    with pytest.raises(RegistryError, match="the spec asks for 0000") as caught:
        tokenizers.build({**asked, "digest": "0" * 64})
    assert caught.value.key == "file"
    with pytest.raises(RegistryError, match="is not there"):
        tokenizers.build({"kind": "hf", "file": "elsewhere.json"})
    elsewhere = tokenizers.build({"kind": "hf", "file": "elsewhere.json", "digest": digest})
    assert elsewhere.vocabulary == 0, "a host that only serves"


def spec(folder: Path, *changes: str) -> assemble.Loaded:
    (folder / "run.yaml").write_text(SPEC)
    return assemble.load_run(folder / "run.yaml", changes)


def test_regions_with_other_tokenizers_do_not_merge(tmp_path: Path):
    first, second = (
        f"data.tokenizer={{kind: hf, file: '{corpora.write_tokenizer(tmp_path, size, f'{size}')}'}}"
        for size in (310, 320)
    )
    loaded = [
        spec(tmp_path, *changes, "model.vocabulary=400").spec
        for changes in ([], [first], [second], [first, "data.limit=2e6"])
    ]
    bytes_, one, other, same = map(assemble.shared_digest, loaded)
    assert len({bytes_, one, other}) == 3 and one == same
    assert "tokenizer" not in assemble.shared_settings(loaded[0])
    served = assemble.spelled_out(loaded[1])
    (tmp_path / "310").unlink()
    assert assemble.shared_digest(served) == one, "a spelled-out spec does without the file"


def test_a_spec_whose_regions_have_other_tokenizers_is_refused(tmp_path: Path):
    path = corpora.write_tokenizer(tmp_path)
    own = f"regions.0.data={{kind: python-source, tokenizer: {{kind: hf, file: '{path}'}}}}"
    with pytest.raises(SpecErrors, match="the same number would be other text"):
        spec(tmp_path, own, "model.vocabulary=400")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path):
    path = corpora.write_tokenizer(tmp_path)
    with pytest.raises(SpecErrors, match="is 256 but the tokenizer of data makes 320"):
        spec(tmp_path, f"data.tokenizer={{kind: hf, file: '{path}'}}", "model.vocabulary=256")


def test_text_is_read_with_a_separator_after_every_file(tmp_path: Path):
    path = corpora.write_tokenizer(tmp_path)
    for number, text in enumerate(corpora.documents(60)):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "60.txt").write_bytes(b"not \xff UTF-8")
    tokenizer = {"kind": "hf", "file": str(path)}
    asked = {"kind": "text", "files": [f"{tmp_path}/*.txt"], "tokenizer": tokenizer, "lanes": 4}
    stream = datasets.build(asked).open(0, 4, 16)
    pieces = [*stream.training.pieces, *stream.apart.pieces]
    assert len(pieces) == 61 and all(piece[-1] == 0 for piece in pieces)
    tokens, _ = stream.batch(stream.start())
    assert tokens.shape == (4, 17) and tokens.max() < 320


def test_a_tokenizer_is_trained_by_a_command_the_same_every_time(tmp_path: Path, capsys):
    corpora.write_lines(tmp_path / "a.jsonl.zst", corpora.documents(60))
    said = []
    for name in ("one.json", "two.json"):
        ask = ("data", "train-tokenizer", tmp_path / "a.jsonl.zst", "--vocabulary", 300)
        code, out, _ = diloco(capsys, *ask, "--out", tmp_path / name, "--format", "json")
        assert code == 0
        said.append(json.loads(out))
    assert said[0]["digest"] == said[1]["digest"] and said[0]["vocabulary"] == 300
    few = ("data", "train-tokenizer", tmp_path / "a.jsonl.zst", "--vocabulary", 100_000)
    code, out, err = diloco(capsys, *few, "--out", tmp_path / "three.json")
    assert code == 0 and "too short for 100,000" in err
    code, _, err = diloco(capsys, *few, "--out", tmp_path / "no" / "where.json")
    assert code == 2 and "there is no folder" in err
