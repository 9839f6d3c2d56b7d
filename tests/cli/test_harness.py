"""`diloco evaluate --harness`: lm-eval on an exported model, offline, with a task of one's own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.harness import diloco, trained

INSTALLED = find_spec("lm_eval") is not None
# 37 packages, three of them built from source: `make test` does without, `make harness` has them.
needs_lm_eval = pytest.mark.skipif(not INSTALLED, reason="lm_eval is missing; `make harness`")

TASK = """
task: a_line
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
LINE = "def area(x): return x * x"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a run, a task, and the task's data."""
    made = tmp_path_factory.mktemp("harness")
    trained(made, [0, 1])
    (made / "tasks").mkdir()
    (made / "lines.jsonl").write_text(json.dumps({"text": LINE}) + "\n")
    (made / "tasks" / "a_line.yaml").write_text(TASK.format(file=made / "lines.jsonl"))
    return made


@needs_lm_eval
def test_the_harness_finds_the_loss_that_we_find(place: Path, capsys):
    # A text's first byte comes after a line's end.
    (place / "line.txt").write_text("\n" + LINE)
    run, file = place / "run", place / "line.txt"
    ours = json.loads(diloco(capsys, "evaluate", run, "--data", file, "--format", "json")[1])
    assert ours["tokens"] == len(LINE)

    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "hf")}

    def asked(*options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "diloco_cli", "evaluate", str(run), *map(str, options)],
            env={**os.environ, **offline},
            capture_output=True,
            text=True,
        )

    tasks = ("--include", place / "tasks", "--format", "json")
    ended = asked("--harness", "a_line", *tasks)
    assert ended.returncode == 0, ended.stderr[-3000:]
    theirs = json.loads(ended.stdout)["tasks"]["a_line"]["bits_per_byte"]
    assert theirs * math.log(2) == pytest.approx(ours["loss"], abs=5e-5)

    ended = asked("--harness", "a_line,no_such_task", *tasks)
    assert ended.returncode == 2
    assert "lm-eval knows no task no_such_task." in ended.stderr
    assert "Traceback" not in ended.stderr
    (place / "lines.jsonl").unlink()
    ended = asked("--harness", "a_line", *tasks)
    assert ended.returncode == 1
    assert "lm-eval failed: FileNotFoundError" in ended.stderr and "hint: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(INSTALLED, reason="lm_eval is installed")
def test_without_the_harness_one_is_told_how_to_install_it(place: Path, capsys):
    code, _, said = diloco(capsys, "evaluate", place / "run", "--harness", "a_line")
    assert code == 2 and "--harness needs lm_eval, not installed here." in said
    assert "pip install 'diloco-cli[lm-eval]'" in said


@pytest.mark.parametrize(
    "options, words",
    [
        (("--harness", "a_line", "--data", "a.txt"), "--data and --harness do not go together."),
        (("--include", "tasks"), "--include is for --harness."),
    ],
)
def test_options_that_do_not_go_together(place: Path, capsys, options, words):
    code, _, said = diloco(capsys, "evaluate", place / "run", *options)
    assert code == 2 and words in said and "hint: " in said
