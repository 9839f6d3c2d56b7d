"""A Hugging Face `Trainer` as a region: a callback of twenty lines.

    cd pipelines/own-trainer; python hf_trainer.py --describe build/hf-trainer.safetensors
    diloco run hf-trainer.yaml

The trainer owns everything: model, collator, optimiser, schedule, precision. The callback counts
each of its steps, and stops it when the run is over.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from diloco_cli import Region
from diloco_cli.region import Outer
from diloco_cli.region.torch_weights import TorchOptimizer, TorchWeights

SEQUENCE, BATCH = 64, 4


class RegionCallback(TrainerCallback):
    """Asks before each step whether to go on, and counts it afterwards."""

    def __init__(self, outer: Outer) -> None:
        self.outer, self.loss = outer, None

    def on_step_end(self, args, state, control, **_):
        self.outer.stepped(tokens=BATCH * SEQUENCE, loss=self.loss, cursor=self.cursor())
        control.should_training_stop = not self.outer.go_on()
        return control

    def on_log(self, args, state, control, logs=None, **_):
        self.loss = (logs or {}).get("loss", self.loss)

    def cursor(self) -> dict:
        return {"windows": self.outer.cursor.get("windows", 0) + BATCH}


class Windows(torch.utils.data.IterableDataset):
    """Bytes of Python's library, from a position on."""

    def __init__(self, start: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
        text = b"".join(file.read_bytes() for file in files)
        self.text, self.start = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), start

    def __iter__(self):
        number = self.start
        while True:
            at = number * SEQUENCE * 7919 % (len(self.text) - SEQUENCE)
            window = self.text[at : at + SEQUENCE]
            yield {"input_ids": window, "labels": window}
            number += 1


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    model = network()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Region.here().join(TorchWeights(model), optimizer=TorchOptimizer(adam)) as outer:
        arguments = Arguments(
            output_dir="build/hf-trainer",
            per_device_train_batch_size=BATCH,
            max_steps=10**9,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Windows(outer.cursor.get("windows", 0)),
            callbacks=[RegionCallback(outer)],
            optimizers=(adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0)),
        )
        if outer.go_on():
            trainer.train()


if __name__ == "__main__":
    if "--describe" in sys.argv:
        print(Region.describe(TorchWeights(network()), sys.argv[-1]))
    else:
        main()
