"""What the two sides tell each other is read to the letter, or refused by key."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.errors import WireError
from diloco_cli.wire import messages
from diloco_cli.wire.error_bodies import error_body, parse_error
from diloco_cli.wire.messages import (
    Decided,
    Heartbeat,
    Join,
    Joined,
    Latest,
    News,
    Run,
    parse,
    parse_heartbeat,
)

DIGEST = "d" * 64
NEWS = News(
    n=17,
    versions=(4, 3),
    calls={1: 3},
    fates={0: Decided(digest=DIGEST, fate="merged")},
    end=False,
    finished=False,
    stop=False,
    evaluate=True,
    lease_seconds=10,
)
JOIN: dict[str, Any] = {
    "owner": "0f3e-77",
    "boot": 2,
    "spec_digest": DIGEST,
    "layout_digest": DIGEST,
    "wire": 1,
}
HEARTBEAT: dict[str, Any] = {
    "epoch": 3,
    "step": 120,
    "training": True,
    "stopping": False,
    "ended": 0,
    "fragments": [{"version": 4, "steps": 10}, {"version": -1, "steps": 0.5}],
    "tokens": {
        "trained": [100, 90.5],
        "applied": [50, 0],
        "pending": [50, 90.5],
        "refused": [0, 0],
        "discarded": [0, 0],
    },
    "loss": 2.5,
    "tokens_per_second": 1000.0,
    "step_seconds": 0.1,
    "restarts": 0,
    "why": "training",
    "heldout": {"versions": [4, 3], "loss": 2.4},
}


def beat(**changes: Any) -> Heartbeat:
    return parse_heartbeat(json.dumps({**HEARTBEAT, **changes}).encode(), fragments=2)


def test_news_survives_the_journey():
    assert parse(News, NEWS.body()) == NEWS
    assert json.loads(NEWS.body())["calls"] == {"1": 3}


def test_a_join_answer_is_news_and_more():
    joined = Joined(**NEWS.model_dump(), epoch=3, high=-1)
    assert parse(Joined, joined.body()) == joined
    assert parse(News, joined.body()) == NEWS


def test_a_heartbeat_is_what_it_says():
    assert beat().fragments[1].steps == 0.5
    assert beat(heldout=None, loss=None).heldout is None
    assert Heartbeat.model_validate(HEARTBEAT) == beat()


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("epoch", -1, "at least 0"),
        ("epoch", "3", "whole number"),
        ("epoch", 2**60, "at most"),
        ("step", 1.5, "whole number"),
        ("training", 1, "true or false"),
        ("training", None, "true or false"),
        ("fragments", [{"version": -2, "steps": 1}], r"fragments\.0\.version"),
        ("fragments", [{"version": 0, "steps": 1, "x": 1}], "no such key"),
        ("fragments", [{"version": 0}], r"fragments\.0\.steps` is missing"),
        ("tokens", {**HEARTBEAT["tokens"], "applied": [-5, 0]}, r"tokens\.applied\.0"),
        ("tokens", {"trained": [0, 0]}, "is missing"),
        ("loss", "low", "number"),
        ("tokens_per_second", -1, "at least 0"),
        ("devices", 0, "at least 1"),
        ("mfu", -0.1, "at least 0"),
        ("device_memory", 1.5, "whole number"),
        ("step_seconds", 1e12, "at most"),
        ("hosts", [{"host": 0, "work_seconds": -1.0, "step_seconds": 1.0}], r"hosts\.0\.work"),
        ("restarts", True, "whole number"),
        ("why", "x" * 1001, "why"),
        ("heldout", {"versions": [1, 1], "loss": float("nan")}, "finite"),
        ("heldout", {"versions": [1, 1], "loss": None}, "number"),
        ("colour", "blue", "no such key"),
    ],
)
def test_a_wrong_heartbeat_is_refused_by_key(key, value, said):
    with pytest.raises(WireError, match=said) as refusal:
        beat(**{key: value})
    assert key in refusal.value.message


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("fragments", HEARTBEAT["fragments"] * 2, "`fragments` has 4 entries"),
        ("tokens", {**HEARTBEAT["tokens"], "pending": [1]}, r"`tokens.pending` has 1 entries"),
        ("heldout", {"versions": [1], "loss": 2.0}, r"`heldout.versions` has 1 entries"),
    ],
)
def test_every_list_has_one_entry_per_fragment(key, value, said):
    with pytest.raises(WireError, match=said):
        beat(**{key: value})


def test_a_loss_that_is_no_number_does_not_silence_the_region():
    assert beat(loss=float("nan")).loss is None
    assert beat(loss=float("inf")).loss is None


def test_rounding_may_leave_a_difference_just_below_zero():
    assert beat(tokens={**HEARTBEAT["tokens"], "pending": [-1e-9, 0]}).tokens.pending[0] < 0


@pytest.mark.parametrize(
    "key, value",
    [("owner", ""), ("owner", "a b"), ("boot", -1), ("spec_digest", "abc"), ("wire", "1")],
)
def test_a_wrong_join_is_refused_by_key(key, value):
    with pytest.raises(WireError, match=f"The join is wrong: `{key}`"):
        parse(Join, json.dumps({**JOIN, key: value}).encode())
    assert parse(Join, json.dumps(JOIN).encode()).boot == 2


def test_answers_of_a_newer_server_may_say_more():
    newer = {**json.loads(NEWS.body()), "colour": "blue"}
    assert parse(News, json.dumps(newer).encode()) == NEWS


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 5000, b'{"n":1e999}'])
def test_what_is_no_message_is_refused(body):
    for kind in (News, Join, Heartbeat, Run, Latest):
        with pytest.raises(WireError, match="is wrong"):
            parse(kind, body)


def test_a_message_beyond_a_mebibyte_is_refused():
    with pytest.raises(WireError, match="is too long"):
        parse(Join, json.dumps({**JOIN, "owner": "x" * (1 << 20)}).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(key=st.sampled_from(sorted(HEARTBEAT)), value=json_values)
def test_no_value_anywhere_does_worse_than_a_refusal(key, value):
    try:
        heartbeat = beat(**{key: value})
    except WireError:
        return
    assert len(heartbeat.fragments) == 2


def test_errors_carry_code_message_hint_and_what_lies_beside():
    body = error_body("held", "eu is held.", "Wait.", retry_seconds=3.5)
    refusal, beside = parse_error(json.dumps(body).encode()) or pytest.fail()
    assert (refusal.code, refusal.message, refusal.hint) == ("held", "eu is held.", "Wait.")
    assert beside == {"retry_seconds": 3.5}


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"<html>", b'{"error": 3}', b'{"a": 1}'])
def test_other_peoples_errors_are_told_apart(body):
    assert parse_error(body) is None


def test_routes_that_servers_match_are_the_paths_that_clients_build():
    from starlette.routing import compile_path

    import diloco_cli.server.http.asgi  # noqa: F401  # It registers the kinds of a path's parts.

    for pattern, path, said in [
        (messages.JOIN, messages.join_path("eu"), {"region": "eu"}),
        (messages.HEARTBEAT, messages.heartbeat_path("eu"), {"region": "eu"}),
        (messages.CALLS, messages.calls_path("eu", after=1, epoch=2), {"region": "eu"}),
        (
            messages.CONTRIBUTION,
            messages.contribution_path(3, "eu-west", 41, 500),
            {"fragment": 3, "region": "eu-west", "base": 41, "clock": 500},
        ),
        (messages.FRAGMENT, messages.fragment_path(3, after=4), {"fragment": 3}),
        (messages.VERSION, messages.version_path(3, 42), {"fragment": 3, "version": 42}),
        (messages.VERSION, messages.version_path(3, 42, since=40), {"fragment": 3, "version": 42}),
    ]:
        regex, _, convertors = compile_path(pattern)
        match = regex.match(path.split("?")[0])
        assert match, path
        found = {key: convertors[key].convert(value) for key, value in match.groupdict().items()}
        assert found == said


def test_queries_are_spelled_as_the_contract_says():
    assert messages.calls_path("eu", after=7, epoch=2) == (
        "/v1/regions/eu/calls?after=7&epoch=2&wait=20"
    )
    assert messages.fragment_path(3, after=-1, wait=0.5) == "/v1/fragments/3?after=-1&wait=0.5"
    assert messages.version_path(3, 42, since=40) == "/v1/fragments/3/versions/42?from=40"
    assert messages.weights_path(9) == "/v1/weights?version=9"
    assert messages.weights_path() == "/v1/weights"
