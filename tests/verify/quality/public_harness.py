"""The downstream score by a public harness, offline: lm-eval on exported weights.

    python -m tests.verify.quality.public_harness build/ladder-weights build/harness.jsonl

The questions are those of downstream.py, which of four endings of a stretch of held-out code is
the real one, written as a task of lm-eval (`multiple_choice`); a stretch that is not plain ASCII
or begins with nothing but blanks is left out. Each file of weights that `ladder.py --weights` kept
is exported as `diloco export` does and scored as `diloco evaluate --harness` does. Needs the extra
`lm-eval`; what is in the file is not scored again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.verify.quality.downstream import asked_of, told

QUESTIONS = 1024
TASK = "next_code"
YAML = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{beginning}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: "{{{{real}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def written(asked: np.ndarray, folder: Path) -> int:
    """Writes task and questions; the real ending stands in each place as often. Gives how many."""
    ending = asked.shape[2] // asked.shape[1]
    lines: list[str] = []
    for rows in asked:
        if rows.max() > 126:
            continue
        beginning, *_ = (bytes(row[:-ending].astype(np.uint8)).decode("ascii") for row in rows)
        if not beginning.strip():
            continue  # The harness counts blanks at its end to the endings: nothing would be left.
        endings = [bytes(row[-ending:].astype(np.uint8)).decode("ascii") for row in rows]
        real = len(lines) % len(endings)
        endings[0], endings[real] = endings[real], endings[0]
        lines.append(json.dumps({"beginning": beginning, "endings": endings, "real": real}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (folder / f"{TASK}.yaml").write_text(YAML.format(task=TASK, file=folder / "questions.jsonl"))
    return len(lines)


def score(path: Path, count: int) -> dict[str, Any]:
    """The record of one file of weights."""
    from diloco_cli.models import models
    from diloco_cli.models.transformer import Transformer
    from diloco_cli.run.model.find import TrainedModel
    from diloco_cli.run.model.harness import run_tasks
    from diloco_cli.worker.text_codec import codec_of

    about, spec, asked = asked_of(path, count)
    model = models.build(spec.model)
    assert isinstance(model, Transformer)
    with np.load(path) as file, tempfile.TemporaryDirectory(prefix="harness-") as place:
        weights = {name: file[name] for name in file.files}
        known = written(asked, Path(place) / "tasks")
        text = codec_of({"tokenizer": {"kind": "bytes"}})
        trained = TrainedModel(path.stem, model, weights, text, spec)
        found = run_tasks(trained, [TASK], Path(place) / "tasks")[TASK]
    return {**about, "questions": known, "right": round(found["acc"], 5)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--only", default="*", help="a pattern of file names without their .npz")
    options = parser.parse_args(words)
    # Nothing is fetched: the data of the task are on the disk.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from diloco_cli.bench.quality.runner import append, read
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    known = {record["id"]: record for record in read(options.file)}
    for path in sorted(options.weights.glob(f"{options.only}.npz")):
        if path.stem not in known:
            known[path.stem] = score(path, options.questions)
            append(options.file, known[path.stem])
            print(json.dumps(known[path.stem]), flush=True)
    print(told(list(known.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
