"""The page about twelve billion parameters says what `diloco plan` prints."""

from __future__ import annotations

import re
import shlex

import pytest

from tests import ROOT
from tests.cli.harness import diloco

PAGE = (ROOT / "docs" / "results" / "twelve-billion.md").read_text()
SPEC = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
PRINTED = re.findall(r"```sh\ndiloco (plan .*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "text"), PRINTED, ids=["h100", "v5p"])
def test_the_page_says_what_plan_prints(tmp_path, monkeypatch, capsys, command, text):
    assert SPEC is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twelve-billion.yaml").write_text(SPEC[1])
    code, out, err = diloco(capsys, *shlex.split(command))
    assert code == 0, err
    assert out.split("\n\n")[0].strip() == text.strip()
    assert "Nothing needs to change." in out
    gigabytes = re.search(r"server +([\d.]+) GB of memory", out)
    assert gigabytes and float(gigabytes[1]) <= 20


def test_both_kinds_of_device_are_on_the_page():
    assert len(PRINTED) == 2
