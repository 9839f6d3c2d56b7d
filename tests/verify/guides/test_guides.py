"""The commands that are tried on hosts in namespaces are those that the guides say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.verify.guides import follow
from tests.verify.guides.follow import Guide

GUIDES = ("several-hosts.md", "tls.md", "backup.md", "lost-server.md")


def tried() -> list[str]:
    tree = ast.parse(Path(follow.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "guide"]
    return [str(arg.value) for call in called for arg in call.args if isinstance(arg, ast.Constant)]


def test_every_command_that_is_tried_is_in_a_guide():
    commands = tried()
    assert len(commands) > 25
    pages = [Guide(name) for name in GUIDES]
    assert [each for each in commands if not any(page.says(each) for page in pages)] == []


def test_a_command_that_no_guide_says_is_refused():
    with pytest.raises(AssertionError, match=r"tls\.md does not say: rm -rf certs"):
        Guide("tls.md")("rm -rf certs")
