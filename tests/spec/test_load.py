"""A spec either loads, or every problem is named at once: place, key, values, way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.spec.load import LARGEST, SpecErrors, load_spec, parse_spec
from diloco_cli.spec.rules import SpecFault
from diloco_cli.spec.schema import RunSpec
from tests.spec.short_spec import GOOD, loaded, problems, the_problem, with_line


def places(text: str) -> list[tuple[int | None, int | None, str]]:
    return [(found.line, found.column, found.key) for found in problems(text)]


def test_a_good_spec_loads_and_the_rest_is_default(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    spec = load_spec(file).spec
    assert [region.name for region in spec.regions] == ["paris", "tokyo"]
    assert (spec.budget.tokens, spec.sync.adopt, spec.wire.up["kind"]) == (
        4_000_000,
        "rebase",
        "int4",
    )


def test_every_mistake_is_reported_at_its_line_and_column():
    text = with_line("fragments: 4", "fragmens: 4").replace("batch: 16", "batch: many")
    text = text.replace("  quorum: 1", "  quorum: 7").replace("name: tokyo", "name: paris")
    assert places(text) == [
        (4, 16, "inner.batch"),
        (7, 12, "regions.1.name"),
        (9, 3, "sync.fragmens"),
        (12, 11, "sync.quorum"),
    ]


def test_an_unknown_key_is_answered_with_the_nearest_known_one():
    found = the_problem(with_line("quorum", "quorm"))
    assert str(found) == "run.yaml:12:3: sync.quorm: no such key"
    assert found.hint == "Did you mean `quorum`?"


def test_a_key_of_another_section_is_sent_home():
    assert the_problem(GOOD + "overlap: 2\n").hint == "It belongs under `sync`."


def test_a_missing_key_is_located_where_it_belongs():
    found = the_problem(with_line("{tokens: 4_000_000}", "{}"))
    assert (found.line, found.key, found.message) == (3, "budget.tokens", "is missing")


def test_wrong_values_are_described_in_plain_words():
    said = {
        found.key: found.message
        for found in problems(
            with_line("name: story", "name: 7")
            .replace("batch: 16", "batch: true")
            .replace("sequence: 128", "sequence: 4")
            .replace("overlap: 2", "adopt: maybe")
            .replace("every: 24", "every: 2.5")
            .replace("{listen: 127.0.0.1:0}", "here")
        )
    }
    assert said == {
        "name": "needs text; got 7",
        "inner.batch": "needs a number; got true",
        "inner.sequence": "must be at least 8; got 4",
        "sync.adopt": "must be 'rebase', 'replace' or 'blend'; got 'maybe'",
        "sync.every": "needs a whole number; got 2.5",
        "server": "needs a mapping (key: value); got 'here'",
    }


def test_a_number_that_is_not_finite_is_no_learning_setting():
    text = with_line("sequence: 128", "clip: .inf")
    assert "needs a number" in the_problem(text).message
    with pytest.raises(ValueError, match="finite"):
        RunSpec.model_validate({**loaded().model_dump(), "inner": {"clip": float("nan")}})


def test_another_version_of_the_format_is_refused_by_name():
    found = the_problem(with_line("spec: 1", "spec: 2"))
    assert found.message == "must be 1; got 2; this version reads run specs of version 1"


def test_one_mistake_does_not_cause_a_second_message():
    # A quorum of 2 would be too much for the stand-in of a list that cannot be read.
    text = GOOD.replace("  - {name: paris}\n  - {name: tokyo}\n", "").replace(
        "regions:", "regions: two"
    )
    assert [found.key for found in problems(text.replace("quorum: 1", "quorum: 2"))] == ["regions"]


def test_a_value_that_is_set_aside_is_no_evidence_for_later_checks():
    def also(spec: RunSpec) -> list[SpecFault]:
        return [SpecFault(("sync", "every"), f"does not suit {spec.model}", beside=(("model",),))]

    text = GOOD + "model: decoder\n"
    with pytest.raises(SpecErrors) as caught:
        parse_spec(text, "run.yaml", also=also)
    assert [found.key for found in caught.value.problems] == ["model"]


def test_an_alias_is_one_mistake_not_two():
    assert the_problem(GOOD + "merge: *other\n").message.startswith("uses the alias *other")


def test_a_later_check_is_located_too_and_joins_the_rest():
    def also(spec: RunSpec) -> list[SpecFault]:
        return [SpecFault(("sync", "every"), "is odd", "Make it even.")]

    with pytest.raises(SpecErrors) as caught:
        parse_spec(with_line("quorum: 1", "quorum: 9"), "run.yaml", also=also)
    assert [str(found) for found in caught.value.problems] == [
        "run.yaml:10:10: sync.every: is odd",
        "run.yaml:12:11: sync.quorum: is 9 but regions lists 2, so no round could ever close",
    ]


def test_the_text_of_many_problems_has_each_with_its_hint():
    with pytest.raises(SpecErrors) as caught:
        loaded(with_line("quorum: 1", "quorum: 9").replace("name: story", "name: A"))
    text = str(caught.value)
    assert text.startswith("run.yaml is not a run spec, 2 problems:\n  run.yaml:2:7: name: needs")
    assert "\n    hint: Set sync.quorum to 2 or less" in text
    assert caught.value.exit_code == 2


def test_a_spec_that_is_no_mapping_is_refused():
    assert "is not a mapping" in the_problem("- spec\n- 1\n").message
    assert "is empty" in the_problem("# nothing\n").message


def test_broken_yaml_is_located():
    found = the_problem(GOOD + "merge: {kind: radial\n")
    assert found.message.startswith("is not YAML:")
    assert found.line == 15


def test_a_control_character_is_located():
    found = the_problem(with_line("name: paris", "name: pàr\x07is"))
    assert (found.line, found.column) == (6, 15)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"spec: 1\n#" + b"x" * LARGEST, "larger than 1 MiB"),
        (b"name: caf\xe9\n", "is not UTF-8 text: byte 9 is 0xe9"),
    ],
)
def test_a_file_that_is_no_spec_is_refused_before_it_is_read(
    tmp_path: Path, content: bytes, said: str
):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=said):
        load_spec(file)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path):
    with pytest.raises(SpecError, match="There is no run spec") as missing:
        load_spec(tmp_path / "run.yaml")
    assert "diloco init" in (missing.value.hint or "")
    with pytest.raises(SpecError, match="is a folder"):
        load_spec(tmp_path)


def test_the_place_of_every_key_can_be_asked_for():
    here = parse_spec(GOOD, "run.yaml", ["sync.every=30"])
    assert (here.locate(("sync", "quorum")).line, here.locate(("sync", "quorum")).column) == (
        12,
        11,
    )
    assert here.locate(("sync", "every")).file == "--set sync.every=30"
    assert here.locate(("regions", 1, "speed")).line == 7  # Not given: the region it belongs to.
