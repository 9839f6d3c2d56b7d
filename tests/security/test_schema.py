"""schemathesis against /openapi.json: whatever is sent, no answer is the server's own fault.

`make schema` sends many more than the few of `make test`, for a bounded time, and prints
what was answered.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies

from diloco_cli.server.http.calls import openapi
from diloco_cli.wire.messages import EPOCH_HEADER, RUN_HEADER, WIRE_HEADER, WIRE_VERSION
from tests.security.tls_server import Guarded, client

pytestmark = pytest.mark.live

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "12"))
CHUNK = 50
SECONDS = 40.0
"""For each operation; no more chunks of its examples are begun then."""
ENDLESS = {"events"}
"""Its answer has no end; tests of the stream read it."""

KNOWN: tuple[dict[str, object] | None, ...] = (
    {"region": "paris", "fragment": 0, "version": 0},
    {"region": "paris", "fragment": 1},
    {"region": "paris"},
    None,
)
"""Names in the path that exist; the rest of a request is made up."""

ROLES = {"upload": ("upload", "paris"), "read": ("read", "looker"), "admin": ("admin", "chief")}


def operations() -> list[Any]:
    found = schemathesis.openapi.from_dict(openapi("test")).get_all_operations()
    every: list[Any] = [getattr(one, "ok")() for one in found]  # noqa: B009
    return [one for one in every if _id(one) not in ENDLESS]


def _id(operation: Any) -> str:
    return operation.definition.raw["operationId"]


@pytest.mark.parametrize("operation", operations(), ids=_id)
def test_no_answer_is_the_servers_own_fault(guarded: Guarded, operation: Any):
    roles = operation.definition.raw.get("x-roles") or ["read"]
    # A real stop would be the end of the test; whoever may not is answered all the same.
    role, name = ROLES["read" if _id(operation) == "stop" else roles[-1]]
    identity = guarded.vault.identity(role, name)  # pyright: ignore[reportArgumentType]
    with client(guarded.url, identity) as asked:
        run = asked.get("/v1/run").json()["run"]
    session = requests.Session()
    session.trust_env = False
    answers: Counter[int] = Counter()
    until = time.monotonic() + SECONDS
    named = {RUN_HEADER: run, WIRE_HEADER: str(WIRE_VERSION), EPOCH_HEADER: "1"}

    @settings(
        max_examples=min(EXAMPLES, CHUNK),
        deadline=None,
        database=None,
        derandomize=EXAMPLES < 100,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    @given(known=strategies.sampled_from(KNOWN), case=operation.as_strategy())
    def ask(known: dict[str, object] | None, case: Any) -> None:
        if known:  # Past the door, or every guess would end there.
            case.headers = {**(case.headers or {}), **named}
            there = {key: known[key] for key in known if key in (case.path_parameters or {})}
            case.path_parameters = {**(case.path_parameters or {}), **there}
        case.query = {**(case.query or {}), "wait": "0"}
        answer = case.call(
            base_url=guarded.url,
            session=session,
            headers=identity.headers,
            verify=str(identity.ca),
            cert=(str(identity.certificate), str(identity.key)),
            timeout=30,
        )
        answers[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and case.method != "HEAD":
            assert set(answer.json()["error"]) >= {"code", "message", "hint"}

    with session:
        for _ in range(-(-EXAMPLES // CHUNK)):
            if time.monotonic() < until:
                ask()
    assert guarded.child.poll() is None and answers.total()
    codes = ", ".join(f"{count} × {code}" for code, count in sorted(answers.items()))
    print(f"{_id(operation)}: {answers.total()} requests: {codes}")
