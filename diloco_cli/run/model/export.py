"""A model's folder as the Hugging Face Hub has it: all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from diloco_cli.errors import SpecError
from diloco_cli.models.hf.families import family_of
from diloco_cli.models.hf.imported import Imported
from diloco_cli.models.hf.read import CONFIG
from diloco_cli.models.hf.write import checked_dtype, write_model
from diloco_cli.run.model.card import model_card
from diloco_cli.run.model.find import TrainedModel
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.outputs import cannot_be_written
from diloco_cli.worker.text_codec import TextCodec, codec_in

ASIDE = ("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")
"""What a tokenizer may have beside tokenizer.json and tokenizer_config.json."""


def export_hf(trained: TrainedModel, out: Path, *, dtype: str = "float32") -> list[str]:
    """Writes the folder and gives the names of its files."""
    checked_dtype(dtype)
    family = family_of(trained.model.shape)
    _refuse_taken(out)
    draft = out.with_name(f".{out.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        sequence = longest(trained.spec)
        write_model(draft, trained.model, trained.weights, sequence=sequence, dtype=dtype)
        _write_tokenizer(draft, trained)
        card = model_card(trained, family=family, dtype=dtype)
        (draft / "README.md").write_text(card, "utf-8")
        if out.is_dir():
            out.rmdir()
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        raise cannot_be_written(out, "--out", error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(path.name for path in out.iterdir())


def longest(spec: RunSpec | None) -> int:
    """The longest sequence that a region trains with."""
    if spec is None:
        return 2048
    return max(spec.inner_of(region.name).sequence for region in spec.regions)


def _refuse_taken(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise SpecError(
            f"{out} exists already.", hint="Name a folder that does not, or delete it first."
        )


def _write_tokenizer(folder: Path, trained: TrainedModel) -> None:
    """The tokenizer's files, if there are any, and its end of text as the model's."""
    source = trained.model.folder if isinstance(trained.model, Imported) else None
    text: TextCodec | None = trained.text
    if source is not None and codec_in(Path(source).expanduser()) is not None:
        home = Path(source).expanduser()
        for name in ("tokenizer.json", "tokenizer_config.json", *ASIDE):
            if (home / name).is_file():
                shutil.copyfile(home / name, folder / name)
        text = text or codec_in(home)
    elif text is not None:
        for name, content in text.files().items():
            (folder / name).write_bytes(content)
    if text is not None and text.end is not None:
        for name in (CONFIG, "generation_config.json"):
            document = json.loads((folder / name).read_text())
            document["eos_token_id"] = text.end
            (folder / name).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
