"""Commands for what a run has learned: export, generate, evaluate."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import finite, output_folder
from diloco_cli.cli.spec import Format, OutputFormat
from diloco_cli.run.find_credential import CertsOption

if TYPE_CHECKING:
    from diloco_cli.run.model.find import TrainedModel

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|DIR|FILE]",
        help="A run (its spec, folder or URL), a folder with config.json and safetensors, or a "
        "file that `diloco pull` wrote. The newest run here when left out.",
        show_default=False,
    ),
]
VersionOption = Annotated[
    int | None,
    typer.Option(
        "--version", metavar="N", min=0, help="An older version of every fragment of a run."
    ),
]
EmaOption = Annotated[
    bool, typer.Option("--ema", help="The average of a run's last versions that `outer.ema` keeps.")
]


class ExportFormat(StrEnum):
    hf = "hf"


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(export)
    app.command()(generate)
    app.command()(evaluate)


def export(
    target: ModelArgument = None,
    format: Annotated[
        ExportFormat,
        typer.Option("--format", help="hf: a folder for transformers, vLLM and so on."),
    ] = ExportFormat.hf,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            callback=output_folder,
            help="The folder to write; must not exist.",
        ),
    ] = Path("exported"),
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="TYPE", help="float32 or bfloat16.")
    ] = "float32",
    version: VersionOption = None,
    ema: EmaOption = False,
    certs: CertsOption = None,
) -> None:
    """Write a model for other programs: config, weights, tokenizer, model card.

    A Qwen3, Llama or Qwen2 folder, whichever the model is; no program needs to know diloco.
    """
    from diloco_cli.run.model.export import export_hf
    from diloco_cli.run.model.find import find_model

    trained = find_model(target, version=version, ema=ema, certs=certs)
    names = export_hf(trained, out, dtype=dtype)
    typer.echo(f"wrote {', '.join(names)}", err=True)
    if not any(name.startswith("tokenizer") for name in names):
        typer.echo(f"{trained.name} does not say what its tokens mean: no tokenizer.json", err=True)
    typer.echo(out)


def generate(
    target: ModelArgument = None,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="What to go on from.")
    ] = "",
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, help="How many tokens to add.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=finite,
            help="0 takes the likeliest token; more, more variety.",
        ),
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="X", min=0.001, max=1.0, callback=finite, help="Draw among the likeliest only."
        ),
    ] = 0.95,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    version: VersionOption = None,
    ema: EmaOption = False,
    certs: CertsOption = None,
    format: OutputFormat = Format.text,
) -> None:
    """Continue a prompt with a model's weights.

    The text comes as it is made, after the prompt. The same seed draws the same text.
    """
    from diloco_cli.errors import SpecError
    from diloco_cli.run.model.find import find_model
    from diloco_cli.worker.text_codec import as_it_comes

    trained = find_model(target, version=version, ema=ema, certs=certs)
    codec = trained.needed_text()
    if not (start := codec.encode(prompt)):
        raise SpecError("--prompt is empty.", hint="Give at least one letter to go on from.")
    if max(start) >= trained.model.shape.vocabulary:
        raise SpecError(
            f"The prompt has token {max(start)}, but {trained.name} knows "
            f"{trained.model.shape.vocabulary}.",
            hint="Its tokenizer is not the one that it was trained with.",
        )
    from diloco_cli.models.generate_flax import generate as continued
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    following = continued(
        trained.model.shape,
        trained.weights,
        start,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    if format is Format.json:
        found = list(following)
        document = {"prompt": prompt, "text": codec.decode(found), "tokens": found}
        typer.echo(json.dumps(document))
        return
    typer.echo(prompt, nl=False)
    for piece in as_it_comes(codec, following):
        typer.echo(_printable(piece), nl=False)
    typer.echo()


def _printable(text: str) -> str:
    """A model may well spell an escape sequence; no terminal is to obey it."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def evaluate(
    target: ModelArgument = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE|CHOICE",
            help="Text files or patterns, all of which is measured; or a dataset as in a spec, "
            "such as '{kind: text, files: [a.txt]}', whose held-out part is. The run's own "
            "held-out text when left out. May be given several times.",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            "--batches",
            metavar="N",
            min=1,
            help="Of held-out text: `evaluate.batches` of the run when left out, 8 of a dataset.",
            show_default=False,
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            "--harness",
            metavar="TASK,TASK",
            help="Tasks of lm-eval instead, such as hellaswag,arc_easy.",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(
            "--include",
            metavar="FOLDER",
            help="Has task files of your own, for --harness.",
            show_default=False,
        ),
    ] = None,
    version: VersionOption = None,
    ema: EmaOption = False,
    certs: CertsOption = None,
    format: OutputFormat = Format.text,
) -> None:
    """Measure a model's loss on text, or its scores on known tasks.

    The loss in nats per token, and as perplexity. Models with other tokenizers are not comparable
    by it. `--harness` exports the model and gives it to lm-eval, which is an extra to install.
    """
    import math

    from diloco_cli.errors import SpecError
    from diloco_cli.run.model import measure
    from diloco_cli.run.model.find import find_model

    choices = [each for each in data or [] if each.lstrip().startswith("{")]
    _refuse_both(data, harness, include)
    if batches is not None and (harness is not None or (data and not choices)):
        raise SpecError(
            "--batches is for held-out text: of files all is measured, and of tasks too.",
            hint="Leave it out, or measure a run's held-out text without --data.",
        )
    trained = find_model(target, version=version, ema=ema, certs=certs)
    if harness is not None:
        _run_harness(trained, harness, include, format)
        return
    if not data:
        found = measure.measure_heldout(trained, batches)
    elif choices:
        found = measure.measure_dataset(trained, _choice(data), batches or measure.BATCHES)
    else:
        found = measure.measure_files(trained, data)
    if format is Format.json:
        document = {
            "model": trained.name,
            "data": found.of,
            "tokens": found.tokens,
            "loss": found.loss,
            "perplexity": math.exp(found.loss),
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(
        f"{found.loss:.4f} nats per token, perplexity {math.exp(found.loss):.4g}, over "
        f"{found.tokens:,} tokens of {found.of}"
    )


def _refuse_both(data: list[str] | None, harness: str | None, include: Path | None) -> None:
    from diloco_cli.errors import SpecError

    if data and harness is not None:
        raise SpecError(
            "--data and --harness do not go together.", hint="Measure one after the other."
        )
    if include is not None and harness is None:
        raise SpecError("--include is for --harness.", hint="Name the tasks with --harness.")


def _run_harness(trained: TrainedModel, harness: str, include: Path | None, format: Format) -> None:
    from diloco_cli.run.model.harness import run_tasks

    tasks = [each for name in harness.split(",") if (each := name.strip())]
    found = run_tasks(trained, tasks, include)
    if format is Format.json:
        typer.echo(json.dumps({"model": trained.name, "tasks": found}))
        return
    for task, metrics in found.items():
        for name, value in metrics.items():
            if "_stderr" not in name:
                error = metrics.get(_stderr_of(name))
                typer.echo(f"{task}  {name} {value:.4f}" + (f" ± {error:.4f}" if error else ""))


def _stderr_of(metric: str) -> str:
    """`acc` → `acc_stderr`, `acc,strict` → `acc_stderr,strict`."""
    name, comma, filtered = metric.partition(",")
    return f"{name}_stderr{comma}{filtered}"


def _choice(data: list[str]) -> dict[str, object]:
    import yaml

    from diloco_cli.errors import SpecError

    if len(data) > 1:
        raise SpecError("--data: a dataset stands alone.", hint="Measure one after the other.")
    try:
        choice = yaml.safe_load(data[0])
    except yaml.YAMLError as error:
        raise SpecError(f"--data {data[0]} is not YAML: {error}.") from None
    if not isinstance(choice, dict):
        raise SpecError(f"--data {data[0]} is not a choice of dataset.", hint="{kind: …, …}")
    return choice
