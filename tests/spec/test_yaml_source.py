"""Only the plain part of YAML is read, and every value knows where it came from."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.spec import yaml_source
from diloco_cli.spec.yaml_source import DEEPEST, SourcePosition, read, scalar


def flaws(text: str) -> list[tuple[int | None, str]]:
    return [(flaw.mark.line, flaw.message) for flaw in read(text, "run.yaml").flaws]


@pytest.mark.parametrize(
    "written, meant",
    [
        ("4_000_000", 4_000_000),
        ("-7", -7),
        ("0xC0FFEE", 0xC0FFEE),
        ("3e-3", 0.003),
        ("3.0e-3", 0.003),
        ("1_000.5", 1000.5),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_numbers_and_words_mean_what_people_mean(written: str, meant: object):
    assert scalar(written) == meant
    assert type(scalar(written)) is type(meant)


@pytest.mark.parametrize(
    "text", ["no", "on", "y", "127.0.0.1:0", "12:30", "1__0", "4_", ".inf", ".nan", "1e999", "0x"]
)
def test_everything_else_is_text(text: str):
    assert scalar(text) == text


def test_a_number_too_long_for_python_is_text():
    assert scalar("9" * 5000) == "9" * 5000


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_every_number_python_writes_is_read_back(number: float):
    assert scalar(repr(number)) == number


@pytest.mark.parametrize(
    "text, column",
    [("a:\n\tb: 1\n", 1), ("a:\n  b: 1\n \tc: 2\n", 2)],
)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_a_tab_is_called_a_tab(monkeypatch: pytest.MonkeyPatch, text: str, column: int, loader):
    monkeypatch.setattr(yaml_source, "_LOADER", getattr(yaml, loader))
    (flaw,) = read(text, "run.yaml").flaws
    assert flaw.message == "is a tab; YAML wants spaces"
    assert flaw.mark.column == column


def test_quotes_keep_a_number_text():
    assert read("a: '7'\nb: 7", "run.yaml").data == {"a": "7", "b": 7}


def test_keys_and_values_are_marked():
    document = read("a:\n  - b: [1, 2]\n", "run.yaml")
    assert document.locate(("a", 0, "b"), key=True) == SourcePosition("run.yaml", 2, 5)
    assert document.locate(("a", 0, "b", 1)) == SourcePosition("run.yaml", 2, 12)


def test_a_duplicate_key_is_a_flaw_and_says_where_the_first_is():
    assert flaws("a: 1\nb: {c: 1, c: {d: [2]}}\na: 3\n") == [
        (2, "is given twice; the first is on line 2"),
        (3, "is given twice; the first is on line 1"),
    ]


def test_aliases_and_anchors_are_flaws():
    assert flaws("a: &x 1\nb: *x\n") == [
        (1, "has the anchor &x; anchors are not read"),
        (2, "uses the alias *x; aliases are not read"),
    ]


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!str", "!mine", "!"])
@pytest.mark.parametrize("value", ["x", "[x]", "{x: 1}"])
def test_tags_are_flaws(tag: str, value: str):
    ((line, said),) = flaws(f"a: {tag} {value}\n")
    assert line == 1
    assert "tags are not read" in said


def test_many_aliases_of_aliases_cost_nothing():
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    assert len(flaws("\n".join(lines))) == 20 + 19 * 9


def test_a_key_that_is_no_word_is_a_flaw_and_the_rest_is_still_read():
    document = read("? [a, b]\n: {c: 1}\nd: 2\n", "run.yaml")
    assert [flaw.message for flaw in document.flaws] == ["has a key that is not a word"]
    assert document.data == {"d": 2}


def test_a_second_document_is_a_flaw():
    assert flaws("a: 1\n---\nb: 2\n") == [(2, "a second YAML document starts here")]


def test_depth_is_bounded():
    deep = "[" * 100_000
    document = read(f"a: {deep}", "run.yaml")
    assert document.broken
    assert f"more than {DEEPEST} levels" in document.flaws[0].message


@pytest.mark.parametrize("text", ["a: 1\nb: [1, {c: 3e-3}]\n", "a: &x 1\nb: *x\n", "a: !t {b: 1}"])
def test_both_parsers_of_pyyaml_give_the_same(monkeypatch: pytest.MonkeyPatch, text: str):
    fast = read(text, "run.yaml")
    monkeypatch.setattr(yaml_source, "_LOADER", yaml.SafeLoader)
    assert read(text, "run.yaml") == fast
