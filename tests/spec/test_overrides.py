"""`--set` goes through the same checks as the file, and is named as the place of its mistakes."""

from __future__ import annotations

import pytest

from tests.spec.short_spec import GOOD, loaded, problems, the_problem


def test_a_value_is_read_as_yaml():
    spec = loaded(
        GOOD,
        "sync.quorum=2",
        "budget.tokens=5_000_000",
        "inner.optimizer.lr=1e-3",
        "sync.grace={kind: fixed, seconds: 3}",
    )
    assert (spec.sync.quorum, spec.budget.tokens) == (2, 5_000_000)
    assert spec.inner.optimizer == {"lr": 0.001}
    assert spec.sync.grace.seconds == 3


def test_list_items_are_counted_from_zero():
    assert loaded(GOOD, "regions.1.speed=0.5").region("tokyo").speed == 0.5


def test_the_last_of_two_overrides_counts():
    assert loaded(GOOD, "sync.every=30", "sync.every=40").sync.every == 40


def test_a_mistake_is_located_at_the_override():
    found = the_problem(GOOD, "sync.quorum=9")
    assert str(found) == (
        "--set sync.quorum=9: sync.quorum: is 9 but regions lists 2, so no round could ever close"
    )
    assert (found.line, found.column) == (None, None)


def test_an_override_takes_the_place_of_what_the_file_said():
    # The file's own mistake in the same section is gone with it.
    text = GOOD.replace("{listen: 127.0.0.1:0}", "{listen: nowhere}")
    assert problems(text, "server={listen: '127.0.0.1:1'}") == []
    assert the_problem(text, "server={lissen: x}").file == "--set server={lissen: x}"


def test_an_unknown_key_is_answered_with_the_nearest_known_one():
    found = the_problem(GOOD, "synk.quorum=1")
    assert (found.key, found.hint) == ("synk", "Did you mean `sync`?")


@pytest.mark.parametrize(
    "assignment, said",
    [
        ("sync.quorum", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("sync..quorum=3", "is not KEY=VALUE"),
        ("regions.2.speed=1", "regions is a list of 2; it has no item '2'"),
        ("regions.-1.speed=1", "regions is a list of 2; it has no item '-1'"),
        ("regions.tokyo.speed=1", "regions is a list of 2; it has no item 'tokyo'"),
        ("name.first=x", "name is 'story', so it has no key 'first'"),
        ("sync.quorum=[", "is not YAML"),
        ("sync.quorum=!!int 3", "tags are not read"),
        ("sync=&a {every: 30}", "anchors are not read"),
    ],
)
def test_an_override_that_leads_nowhere_says_why(assignment: str, said: str):
    found = the_problem(GOOD, assignment)
    assert said in found.message
    assert found.file == f"--set {assignment}"


def test_overrides_are_listed_after_the_file():
    text = GOOD.replace("name: story", "name: A")
    files = [found.file for found in problems(text, "sync.quorum=9")]
    assert files == ["run.yaml", "--set sync.quorum=9"]


def test_a_broken_file_is_reported_without_guesses_about_overrides():
    assert [found.file for found in problems("{", "sync.quorum=9")] == ["run.yaml"]
