"""A credential in a spec is refused, and its value is repeated nowhere."""

from __future__ import annotations

import pytest

from diloco_cli.spec.secrets import is_secret
from tests.spec.short_spec import GOOD, problems, the_problem


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "Token",
        "auth_token",
        "hf_token",
        "password",
        "db_password",
        "client_secret",
        "api_key",
        "apikey",
        "private-key",
        "credentials",
        "passphrase",
    ],
)
def test_a_secret_is_refused_and_not_repeated(key: str):
    found = the_problem(GOOD + f"data: {{kind: text, {key}: hunter2}}\n")
    assert (found.line, found.key) == (14, f"data.{key}")
    assert "hunter2" not in f"{found} {found.hint}"
    assert "change the secret" in (found.hint or "")


@pytest.mark.parametrize("assignment", ["server.token=hunter2", "server={token: hunter2}"])
def test_an_override_with_a_secret_is_not_repeated_either(assignment: str):
    said = " ".join(f"{found} {found.hint}" for found in problems(GOOD, assignment))
    assert "is a secret inside the spec" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "key", ["tokens", "token_file", "token_env", "tokenizer", "keys", "author"]
)
def test_innocent_words_are_not_mistaken_for_secrets(key: str):
    assert not is_secret(key)


def test_a_name_without_a_value_is_only_an_unknown_key():
    assert the_problem(GOOD.replace("{listen: 127.0.0.1:0}", "{token: }")).message == "no such key"


def test_a_secret_under_an_unknown_key_is_one_mistake_not_two():
    assert "is a secret" in the_problem(GOOD, "server.password=x").message
