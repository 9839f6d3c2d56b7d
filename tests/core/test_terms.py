"""Terms: amendments laid over the first spec, and what a request may not do."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.core import terms
from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.terms import AmendmentRequest, Made, Overtaken

FIRST: dict[str, Any] = {
    "budget": {"tokens": 1000},
    "regions": [{"name": "paris"}, {"name": "iowa", "inner": {"batch": 8}}],
    "sync": {"quorum": 1, "every": 24},
    "outer": {"kind": "nesterov", "lr": 0.4, "momentum": 0.9},
    "inner": {"batch": 16},
}


def record(number: int, **changes: Any) -> TermsAmended:
    return TermsAmended(number, f"id-{number}", **changes)


def test_terms_are_the_first_spec_with_every_amendment_laid_over_it():
    newest = terms.overlay(
        FIRST,
        [
            record(1, set={"outer.lr": 0.7, "sync.quorum": 2}),
            record(2, set={"outer.lr": 0.5}, add=({"name": "oslo"},), remove=("paris",)),
            record(3, set={"regions.oslo.inner.batch": 4, "sync.quorum": None}),
        ],
    )
    assert newest["outer"] == {"kind": "nesterov", "lr": 0.5, "momentum": 0.9}
    assert newest["sync"] == {"every": 24}
    assert newest["regions"] == [
        {"name": "iowa", "inner": {"batch": 8}},
        {"name": "oslo", "inner": {"batch": 4}},
    ]
    assert FIRST["outer"]["lr"] == 0.4
    assert FIRST["regions"][0] == {"name": "paris"}


def test_a_region_that_is_removed_and_added_in_one_amendment_starts_from_its_new_spec():
    newest = terms.overlay(FIRST, [record(1, remove=("iowa",), add=({"name": "iowa"},))])
    assert newest["regions"] == [{"name": "paris"}, {"name": "iowa"}]


def test_a_file_that_does_not_list_a_region_has_no_use_for_its_keys():
    alone = {**FIRST, "regions": [{"name": "paris"}]}
    newest = terms.overlay(alone, [record(1, set={"regions.iowa.inner.batch": 2})])
    assert newest["regions"] == [{"name": "paris"}]


def test_a_retry_gets_the_recorded_answer_whatever_it_was_made_for():
    made = [record(1, set={"sync.quorum": 2}), record(2)]
    assert terms.known(made, AmendmentRequest("id-1", after=0)) == Made(made[0])
    assert terms.known(made, AmendmentRequest("id-1", after=7)) == Made(made[0])


def test_a_request_for_older_terms_is_told_what_changed_since():
    made = [record(1), record(2, set={"sync.quorum": 2})]
    assert terms.known(made, AmendmentRequest("new", after=1)) == Overtaken(2, (made[1],))
    assert terms.known(made, AmendmentRequest("new", after=2)) is None
    assert terms.known(made, AmendmentRequest("new")) is None


@pytest.mark.parametrize(
    ("request_", "key", "said"),
    [
        ({"set": {"model.width": 256}}, "model.width", "never changes"),
        ({"set": {"wire.rate_limit": "1Mbit"}}, "wire.rate_limit", "cannot be amended"),
        ({"set": {"sync": {"quorum": 2}}}, "sync", "is a section"),
        ({"set": {"regions": []}}, "regions", "by name"),
        ({"set": {"regions.oslo.inner": {}}}, "regions.oslo.inner", "does not have"),
        ({"set": {"sync..quorum": 2}}, "sync..quorum", "no key"),
        ({"add": ({"name": "iowa"},)}, "regions.iowa", "already"),
        ({"add": ({"inner": {}},)}, "regions", "without a name"),
        ({"remove": ("oslo",)}, "regions.oslo", "not in the run"),
    ],
)
def test_a_request_that_may_not_be_made_names_the_key(request_: Any, key: str, said: str):
    (fault,) = terms.faults_of(FIRST, AmendmentRequest("x", **request_))
    assert fault.key == key and said in fault.message


def test_changes_name_every_key_that_differs_and_regions_by_name():
    after = terms.overlay(
        FIRST, [record(1, set={"outer": {"kind": "sgd", "lr": 1.0}}, add=({"name": "oslo"},))]
    )
    found = {change.key: (change.before, change.after) for change in terms.changes(FIRST, after)}
    assert found == {
        "outer.kind": ("nesterov", "sgd"),
        "outer.lr": (0.4, 1.0),
        "outer.momentum": (0.9, None),
        "regions.oslo": (None, True),
    }


def test_a_whole_section_cannot_smuggle_in_what_never_changes():
    before = {**FIRST, "data": {"kind": "text", "files": ["a"], "heldout": 0.05}}
    after = terms.overlay(
        before, [record(1, set={"data": {"kind": "text", "files": ["b"], "heldout": 0.5}})]
    )
    faults = [fault for it in terms.changes(before, after) if (fault := terms.forbidden(it))]
    assert [fault.key for fault in faults] == ["data.heldout"]


@pytest.mark.parametrize(
    ("budget", "applied", "again"), [(2000, 1100, True), (1050, 1100, False), (1000, 900, False)]
)
def test_only_a_larger_budget_with_something_left_opens_a_run_again(budget, applied, again):
    after = terms.overlay(FIRST, [record(1, set={"budget.tokens": budget})])
    assert terms.reopens(after, FIRST, applied=applied) is again
