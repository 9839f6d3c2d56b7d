"""The curves of a run as PNG files. Needs matplotlib, which comes with the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.errors import SpecError
from diloco_cli.observe.run_record import RunRecord


def pictures(record: RunRecord, beside: Path) -> list[Path]:
    """Writes the losses and the speed beside a report; says where."""
    try:
        import matplotlib
    except ImportError:
        raise SpecError(
            "Pictures need matplotlib, which is not installed.",
            hint="Install it: pip install 'diloco-cli[plot]'.",
        ) from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    losses, speed = Figure(figsize=(9, 5)), Figure(figsize=(9, 5))
    axes = losses.subplots()
    axes.plot(record.evaluations["tokens"], record.evaluations["loss"], "k.-", label="held-out")
    if record.ema["loss"]:
        axes.plot(record.ema["tokens"], record.ema["loss"], "k--", label="EMA")
    axes.set(xlabel="merged tokens", ylabel="loss, nats per token", yscale="log")
    axes.set_title(record.name)
    axes.legend()
    axes = speed.subplots()
    for name, columns in record.regions.items():
        axes.plot(columns["at"], columns["tokens_per_second"], label=name)
    axes.set(xlabel="seconds", ylabel="tokens per second", title=record.name)
    if record.regions:
        axes.legend()
    written = []
    for name, figure in (("loss", losses), ("speed", speed)):
        path = beside.with_name(f"{beside.stem}-{name}.png")
        figure.savefig(path, dpi=120, bbox_inches="tight")
        written.append(path)
    return written
