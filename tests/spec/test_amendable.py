"""Every key of the spec has a rule that says whether it may change in a run that has begun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from diloco_cli.spec.amendable import RULES, rule_of, trainer_reads
from diloco_cli.spec.schema import RunSpec, keys_at
from diloco_cli.spec.schema import section_of as section


def keys_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every key, down to those that a kind decides about."""
    for name, field in model.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner = section(field.annotation)
        if inner is None or (key in RULES and key != "regions"):
            yield key
        else:
            yield from keys_of(inner, f"{key}.*" if key == "regions" else key)


def test_every_key_has_a_rule():
    keys = list(keys_of(RunSpec))
    assert "sync.quorum" in keys and "regions.*.inner" in keys
    assert [key for key in keys if rule_of(key) is None] == []


def test_no_rule_speaks_of_a_key_that_is_not_there():
    for key in RULES:
        steps = key.split(".")
        below = tuple(0 if step == "*" else step for step in steps[:-1])
        known = keys_at(below)
        assert steps[-1] in known or not known, key


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("sync.quorum", True),
        ("sync.fragments", False),
        ("model.width", False),
        ("outer.lr", True),
        ("data.files", True),
        ("data.tokenizer.kind", False),
        ("regions.oslo.inner.batch", True),
        ("regions.oslo.name", False),
        ("regions.oslo.speed", False),
        ("regions", False),
        ("sync", None),
        ("regions.oslo", None),
        ("nothing.like.it", None),
    ],
)
def test_the_longest_row_decides(key: str, allowed: bool | None):
    rule = rule_of(key)
    assert (rule.allowed if rule else None) == allowed


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("inner.optimizer.lr", True),
        ("sync.adopt", True),
        ("wire.up.kind", True),
        ("budget.tokens", True),
        ("model.width", True),
        ("chaos.step_seconds", True),
        ("regions.oslo.inner.batch", True),
        ("regions.oslo.speed", True),
        ("regions.oslo.token_file", False),
        ("regions.paris.inner.batch", False),
        ("regions.paris", False),
        ("wire.rate_limit", False),
        ("wire.down.kind", False),
        ("sync.quorum", False),
        ("sync.every", False),
        ("outer.lr", False),
        ("server.lease", False),
        ("evaluate.region", False),
    ],
)
def test_a_trainer_starts_anew_only_for_what_it_reads(key: str, read: bool):
    assert trainer_reads(key, "oslo") is read


def test_what_may_not_change_says_why_and_what_to_do_instead():
    silent = [key for key, rule in RULES.items() if not rule.allowed and not rule.why]
    assert silent == []
    assert [key for key, rule in RULES.items() if not rule.allowed and not rule.instead] == []
