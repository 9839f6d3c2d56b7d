"""A short spec that loads, and what is said about changes to it."""

from __future__ import annotations

from diloco_cli.spec.load import Problem, SpecErrors, parse_spec
from diloco_cli.spec.schema import RunSpec

GOOD = """\
spec: 1
name: story
budget: {tokens: 4_000_000}
inner: {batch: 16, sequence: 128}
regions:
  - {name: paris}
  - {name: tokyo}
sync:
  fragments: 4
  every: 24
  overlap: 2
  quorum: 1
server: {listen: 127.0.0.1:0}
"""


def loaded(text: str = GOOD, *overrides: str) -> RunSpec:
    return parse_spec(text, "run.yaml", overrides).spec


def problems(text: str = GOOD, *overrides: str) -> list[Problem]:
    """Lists what is wrong; nothing if the spec loads."""
    try:
        loaded(text, *overrides)
    except SpecErrors as error:
        return error.problems
    return []


def the_problem(text: str = GOOD, *overrides: str) -> Problem:
    """Gives the one thing that is wrong, and insists that it is the only one."""
    (only,) = problems(text, *overrides)
    return only


def with_line(old: str, new: str) -> str:
    """Changes the spec, and insists that there was something to change."""
    assert old in GOOD
    return GOOD.replace(old, new)
