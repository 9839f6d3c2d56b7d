"""`diloco data`: text becomes tokens before a run, and tokenizers for it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import finite, output_file, output_folder
from diloco_cli.cli.spec import Format, OutputFormat

if TYPE_CHECKING:
    from diloco_cli.data.prepare import Reached

data = typer.Typer(
    name="data",
    help="Make tokens of text, and tokenizers, before a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="IN…",
        help="Files, folders or patterns: text, .jsonl (both also .gz, .zst), .parquet, .arrow.",
    ),
]
Field = Annotated[
    str,
    typer.Option("--field", metavar="NAME", help="Where JSON lines and tables have the text."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(data)


@data.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", metavar="N", min=257, help="Different tokens.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", callback=output_file, help="The tokenizer.json to write."
        ),
    ],
    field: Field = "text",
    format: OutputFormat = Format.text,
) -> None:
    """Train a byte-level BPE tokenizer.

    Any text can be encoded with it, and comes back as it was; `<|endoftext|>` ends documents.
    The text is read into memory as words and how often they occur: some gigabytes of it do.
    """
    from diloco_cli.data import hf_tokenizer
    from diloco_cli.data.sources import documents, find_sources
    from diloco_cli.system.files import keep_bytes
    from diloco_cli.system.outputs import writing

    sources = find_sources(inputs)
    texts = (text for source in sources for text in documents(source, field))
    made = hf_tokenizer.train_tokenizer(texts, vocabulary)
    with writing(out, "--out"):
        keep_bytes(out, made.to_str(pretty=True).encode(), mode=0o644)
    opened = hf_tokenizer.open_tokenizer(out)
    if format is Format.json:
        said = {"file": str(out), "vocabulary": opened.vocabulary, "digest": opened.digest}
        typer.echo(json.dumps(said))
        return
    typer.echo(f"{out}: {opened.vocabulary:,} tokens, digest {opened.digest[:12]}")
    if opened.vocabulary < vocabulary:
        typer.echo(
            f"The text is too short for {vocabulary:,}; more of it would give more.", err=True
        )


@data.command()
def prepare(
    inputs: Inputs,
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", metavar="FILE", help="The tokenizer.json to use.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", callback=output_folder, help="The folder to make."),
    ],
    shards: Annotated[int, typer.Option("--shards", metavar="N", min=1, max=99_999)] = 16,
    heldout: Annotated[
        float,
        typer.Option(
            "--heldout",
            metavar="SHARE",
            callback=finite,
            help="Of the documents, never trained on.",
        ),
    ] = 0.01,
    field: Field = "text",
    separator: Annotated[
        str | None,
        typer.Option("--separator", metavar="TOKEN", help="Ends documents, if not the usual one."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--begin", metavar="TOKEN", help="Put before every document, such as <bos>."),
    ] = None,
    format: OutputFormat = Format.text,
) -> None:
    """Turn text into a folder of tokens, for `data: {kind: tokens, folder: DIR}`.

    Interrupted, the same command goes on where it was, and makes the same bytes. On a finished
    folder it checks every digest: exit code 5 where one differs.
    """
    from diloco_cli.data import prepare as preparing
    from diloco_cli.data.hf_tokenizer import open_tokenizer
    from diloco_cli.data.sources import find_sources
    from diloco_cli.errors import SpecError

    if not 0 < heldout < 1:
        raise SpecError(
            f"--heldout must be between 0 and 1; got {heldout:g}.", hint="0.01 is one in a hundred."
        )
    opened = open_tokenizer(tokenizer, separator)
    what = preparing.Preparation(
        sources=tuple(find_sources(inputs)),
        tokenizer=opened,
        out=out,
        shards=shards,
        share=heldout,
        field=field,
        begin=None if begin is None else opened.number(begin),
    )
    try:
        manifest = preparing.prepare(what, _progress(len(what.sources)))
    finally:
        if sys.stderr.isatty():
            typer.echo("\r\x1b[K", err=True, nl=False)
    if format is Format.json:
        said = {
            "folder": str(out),
            "digest": manifest.digest,
            "tokens": manifest.tokens,
            "documents": manifest.documents,
            "heldout": {
                "tokens": manifest.heldout.tokens,
                "documents": manifest.heldout.documents,
            },
            "vocabulary": manifest.vocabulary,
        }
        typer.echo(json.dumps(said))
        return
    typer.echo(f"{out}: {manifest.tokens:,} tokens in {manifest.documents:,} documents")
    apart = manifest.heldout
    typer.echo(f"  held out  {apart.tokens:,} tokens in {apart.documents:,}: {out}/heldout.jsonl")
    typer.echo(f"  digest    {manifest.digest[:12]}")
    typer.echo(f"  in a spec data: {{kind: tokens, folder: {out}}}, model.vocabulary ≥ ", nl=False)
    typer.echo(f"{manifest.vocabulary}")


def _progress(sources: int) -> Callable[[Reached], None]:
    """Says how far it is on a terminal all the time, elsewhere now and then."""
    from diloco_cli.observe.units import amount

    on_terminal = sys.stderr.isatty()
    began = time.monotonic()
    at_first: list[int] = []
    said = [began]

    def report(reached: Reached) -> None:
        now = time.monotonic()
        if not at_first:
            at_first.append(reached.tokens)
        if now - said[0] < (0.2 if on_terminal else 30):
            return
        said[0] = now
        speed = (reached.tokens - at_first[0]) / (now - began)
        line = (
            f"{reached.source} of {sources} files, {amount(reached.tokens)} tokens, "
            f"{amount(speed)} a second"
        )
        typer.echo(f"\r\x1b[K{line}" if on_terminal else line, err=True, nl=not on_terminal)

    return report
