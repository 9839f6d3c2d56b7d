"""A kind is a frozen dataclass under a name; a wrong choice says which, and what was meant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from pydantic import Field

from diloco_cli.errors import RegistryError
from diloco_cli.registry import Registry

boats: Registry[Any] = Registry("boat")


@boats.register("ferry")
@dataclass(frozen=True)
class Ferry:
    seats: Annotated[int, Field(ge=1)] = 100
    stops: tuple[str, ...] = ()
    name: str = field(default="", init=False)


@boats.register("raft")
@dataclass(frozen=True)
class Raft:
    logs: int

    def __post_init__(self) -> None:
        if self.logs == 13:
            raise ValueError("thirteen logs sink")
        if self.logs == 14:
            raise RegistryError("There is no tree of that kind.", key="logs")


def wrong(**asked: object) -> list[tuple[str, str]]:
    _, errors = boats.inspect(asked)
    return [(error.key, error.message) for error in errors]


def test_a_choice_is_made_with_its_options():
    assert boats.build({"kind": "ferry", "seats": 7, "stops": ["a"]}) == Ferry(7, ("a",))


def test_an_unknown_kind_is_answered_with_the_nearest():
    with pytest.raises(RegistryError, match="There is no boat called 'fery'") as caught:
        boats.build({"kind": "fery"})
    assert (caught.value.hint, caught.value.exit_code) == ("Did you mean `ferry`?", 2)


def test_a_choice_without_a_kind_lists_what_there_is():
    with pytest.raises(RegistryError, match="The boat needs a `kind`") as caught:
        boats.build({})
    assert caught.value.hint == "Known kinds: ferry, raft"


@pytest.mark.parametrize("kind", [["ferry"], {}, 7, True])
def test_a_kind_that_is_no_word_is_refused(kind: object):
    assert wrong(kind=kind)[0][0] == "kind"


def test_everything_wrong_with_a_choice_is_listed():
    assert wrong(kind="ferry", seets=1, seats=0, stops=["a", 2], name="x") == [
        ("seets", "The boat 'ferry' has no option 'seets'."),
        ("name", "The boat 'ferry' has no option 'name'."),
        ("seats", "The boat 'ferry': seats must be at least 1; got 0"),
        ("stops.1", "The boat 'ferry': stops.1 needs text; got 2"),
    ]


def test_a_missing_option_is_named():
    assert wrong(kind="raft") == [("logs", "The boat 'raft': logs is missing")]


def test_what_a_choice_says_about_itself_is_passed_on():
    assert wrong(kind="raft", logs=13) == [("kind", "The boat 'raft': thirteen logs sink")]
    assert wrong(kind="raft", logs=14) == [("logs", "There is no tree of that kind.")]


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="boat 'ferry' is taken"):
        boats.register("ferry")(Raft)
