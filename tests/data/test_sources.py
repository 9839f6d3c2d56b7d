"""Documents come out of every form of file as they went in, and bad files are named."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from diloco_cli.data.first_bytes import NotText, kind_of
from diloco_cli.data.prepare import prepare
from diloco_cli.data.sources import TextSource, documents, find_sources
from diloco_cli.data.text import Text
from diloco_cli.errors import SpecError
from tests.cli.harness import SPEC, diloco
from tests.data import corpora

TEXTS = [*corpora.documents(20), "ümlaut → 文", ""]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst"])
def test_json_lines_are_read_packed_or_not(tmp_path: Path, name: str):
    source = TextSource.of(corpora.write_lines(tmp_path / name, TEXTS))
    assert list(documents(source)) == TEXTS
    assert list(documents(source, skip=13)) == TEXTS[13:]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a-stream.arrow", "a.feather"])
def test_tables_are_read(tmp_path: Path, name: str):
    source = TextSource.of(corpora.write_table(tmp_path / name, TEXTS))
    assert list(documents(source)) == TEXTS
    for skip in (6, 7, 13, 22):
        assert list(documents(source, skip=skip)) == TEXTS[skip:]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.txt.zst", "README"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str):
    data = "Ein Satz.\nNoch einer: ü".encode()
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}
    path = tmp_path / name
    path.write_bytes(packed.get(path.suffix, bytes)(data))
    assert list(documents(TextSource.of(path))) == [data.decode()]
    assert list(documents(TextSource.of(path), skip=1)) == []


def test_zstd_files_of_several_frames_are_read_to_the_end(tmp_path: Path):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two"))
    assert list(documents(TextSource.of(path))) == ["one two"]


def test_files_are_found_in_folders_and_by_pattern_in_one_order(tmp_path: Path):
    for name in ("b/x.txt", "a/y.jsonl", "b/.hidden", ".git/z"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = find_sources([str(tmp_path), f"{tmp_path}/b/*.txt"])
    assert [source.path.name for source in found] == ["y.jsonl", "x.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match="holds no files"):
        find_sources([str(tmp_path / "empty")])
    with pytest.raises(SpecError, match="no file matches"):
        find_sources([str(tmp_path / "*.nothing")])


def refused(source: TextSource, field: str = "text") -> SpecError:
    with pytest.raises(SpecError) as caught:
        list(documents(source, field))
    assert caught.value.hint and str(source.path) in caught.value.message
    return caught.value


def test_a_line_without_the_field_is_named_with_the_fields_it_has(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"body": "b", "id": 3}\n')
    error = refused(TextSource.of(path))
    assert "line 3: there is no field 'text'; fields with text are: body" in error.message
    assert "--field body" in (error.hint or "")
    path.write_text('{"text": 5}\n')
    assert "line 1: int, not text" in refused(TextSource.of(path)).message
    path.write_text('{"text": "a"}\n{"text": "b"\n')
    assert "line 2: not JSON" in refused(TextSource.of(path)).message
    path.write_text('["a"]\n')
    assert "line 1: needs a JSON object, has a list" in refused(TextSource.of(path)).message


def test_half_a_character_is_replaced_as_bytes_are_that_are_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00, \\uDE00\\n"}\n')
    texts = list(documents(TextSource.of(path)))
    assert texts == ["cut \ufffd", "whole \U0001f600, \ufffd\n"]
    corpora.write_lines(tmp_path / "docs" / "b.jsonl", [*TEXTS, "cut \ud83d"])
    assert prepare(corpora.preparation(tmp_path / "docs", tmp_path / "out")).documents


def test_a_line_of_brackets_without_end_is_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    assert "line 2: not JSON: " in refused(TextSource.of(path)).message


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a-stream.arrow"])
def test_a_table_without_the_column_is_named(tmp_path: Path, name: str):
    source = TextSource.of(corpora.write_table(tmp_path / name, TEXTS, field="body"))
    assert "fields with text are: body" in refused(source).message
    assert list(documents(source, "body")) == TEXTS


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.arrow", "a-stream.arrow", "a.jsonl.gz", "a.jsonl.zst"]
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str):
    write = corpora.write_lines if "jsonl" in name else corpora.write_table
    path = write(tmp_path / name, TEXTS)
    whole = path.read_bytes()
    for size in (len(whole) * 2 // 3, len(whole) - 8):
        path.write_bytes(whole[:size])
        refused(TextSource.of(path))
    path.write_bytes(b"not what the name says" * 9)
    refused(TextSource.of(path))


def test_damage_inside_a_table_is_said_in_one_printable_line(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["hello world " * 50] * 200}), path)
    data = bytearray(path.read_bytes())
    data[8:300] = bytes(each ^ 0x5A for each in data[8:300])
    path.write_bytes(data)
    message = refused(TextSource.of(path)).message
    assert message.isprintable() and message.endswith(".") and not message.endswith(" .")


def test_a_cell_of_nothing_is_named_by_its_row(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    assert "row 1" in refused(TextSource.of(path)).message


OTHERS = {
    "a PDF": b"%PDF-1.7\n%\xe2\xe3",
    "compressed with gzip": gzip.compress(b"text"),
    "compressed with zstd": zstandard.compress(b"text"),
    "a program": Path(sys.executable).resolve().read_bytes()[:512],
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(8),
    "a zip archive or an office document": b"PK\x03\x04" + bytes(20),
    "a Parquet file": b"PAR1" + bytes(20),
    "text in UTF-32": "text".encode("utf-32"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_files_that_are_not_text_are_refused_by_their_first_bytes(tmp_path: Path, what: str):
    path = tmp_path / "book.txt"
    path.write_bytes(OTHERS[what])
    assert what in refused(TextSource.of(path)).message
    with pytest.raises(NotText, match=what):
        Text((str(path),)).find()


def test_text_is_not_taken_for_something_else():
    for text in ("MZ was here", "BZh is a name", "RIFFraff", "GIF89", "PK", "ID3", "", "%PDF"):
        assert kind_of(text.encode(), strict=True) is None
    assert kind_of("text".encode("utf-16"), strict=True) == "text in UTF-16"
    assert kind_of(struct.pack("<4H", 1, 2, 3, 4), strict=True) == "a binary file"
    assert kind_of(struct.pack("<4H", 1, 2, 3, 4)) is None, "bytes may be any bytes"


def test_without_pyarrow_tables_are_refused_with_what_to_install(tmp_path: Path):
    path = corpora.write_table(tmp_path / "a.parquet", TEXTS)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from diloco_cli.data.sources import TextSource, documents\n"
        "from diloco_cli.errors import SpecError\n"
        f"try: list(documents(TextSource.of(Path({str(path)!r}))))\n"
        "except SpecError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "without pyarrow" in said.stdout and "diloco-cli[arrow]" in said.stdout


def test_validate_refuses_files_that_are_not_text(tmp_path: Path, capsys):
    (tmp_path / "book.txt").write_bytes(OTHERS["a PDF"])
    text = SPEC.replace("{kind: python-source}", f"{{kind: text, files: ['{tmp_path}/*.txt']}}")
    (tmp_path / "run.yaml").write_text(text)
    code, _, err = diloco(capsys, "validate", tmp_path / "run.yaml")
    assert code == 2 and "book.txt is not text: it is a PDF" in err
