"""The README of an exported model: what it is, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_cli.models import parameters
from diloco_cli.observe.status import LossStatus, Summary
from diloco_cli.run.folder import last_summary
from diloco_cli.run.model.find import TrainedModel

AVERAGE = "These weights are the average of the last versions of the run, which `outer.ema` keeps."


def model_card(trained: TrainedModel, *, family: str, dtype: str) -> str:
    """Writes it in Markdown, with the head that the Hub reads."""
    summary = last_summary(trained.folder) if trained.folder else None
    name = trained.spec.name if trained.spec else Path(trained.name).name
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""),
        f"# {name}",
        "",
        f"A {family} model of {parameters(trained.model):,} parameters in {dtype}, pretrained with "
        "`diloco` in regions that train apart and merge what they have learned now and then.",
        "",
        *((AVERAGE, "") if trained.averaged else ()),
        "| | |",
        "| --- | --- |",
        *(f"| {label} | {value} |" for label, value in _rows(trained, summary)),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        "model = AutoModelForCausalLM.from_pretrained(FOLDER)",
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
        "```",
        "",
    ]
    return "\n".join(lines)


def _rows(trained: TrainedModel, summary: Summary | None) -> list[tuple[str, Any]]:
    spec, rows = trained.spec, [("run", trained.metadata.get("run", "unknown"))]
    rows.append(("versions of its fragments", trained.metadata.get("versions", "unknown")))
    if spec is not None:
        rows += [
            ("model", _inline(spec.model)),
            ("data", _inline(spec.data)),
            ("regions", ", ".join(region.name for region in spec.regions)),
        ]
    if summary is None:
        return rows
    if summary.tokens is not None:
        rows.append(("tokens merged", f"{summary.tokens.applied:,.0f}"))
    rows += [
        (label, f"{loss:.4f} nats per token")
        for label, loss in _heldout(trained, summary.loss)
        if loss is not None
    ]
    if summary.outer_steps is not None:
        rows.append(("outer steps", f"{summary.outer_steps:,}"))
    return [*rows, ("spec digest", f"`{summary.spec_digest[:16]}`")]


def _heldout(trained: TrainedModel, losses: LossStatus) -> list[tuple[str, float | None]]:
    """What was measured of these weights; of others of the run only with their outer step."""
    own, at = losses.heldout, losses.heldout_at
    if trained.averaged:
        own, at = losses.ema, losses.ema_at
    which = "the average" if trained.averaged else "the run"
    measured = "these weights" if at == trained.outer_steps else f"{which} at outer step {at}"
    return [
        ("held-out loss before training", losses.first),
        (f"held-out loss of {measured}", own),
        ("best held-out loss of any version", losses.best),
    ]


def _inline(choice: Any) -> str:
    return f"`{json.dumps(choice)}`".replace("|", "\\|")
