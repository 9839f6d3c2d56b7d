"""The README of an exported model: what it is, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_cli.models import parameters
from diloco_cli.observe.status import Summary
from diloco_cli.run.folder import last_summary
from diloco_cli.run.model.find import TrainedModel


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
    for label, loss in (
        ("held-out loss before training", summary.loss.first),
        ("held-out loss at the end", summary.loss.heldout),
        ("best held-out loss", summary.loss.best),
    ):
        if loss is not None:
            rows.append((label, f"{loss:.4f} nats per token"))
    if summary.outer_steps is not None:
        rows.append(("outer steps", f"{summary.outer_steps:,}"))
    return [*rows, ("spec digest", f"`{summary.spec_digest[:16]}`")]


def _inline(choice: Any) -> str:
    return f"`{json.dumps(choice)}`".replace("|", "\\|")
