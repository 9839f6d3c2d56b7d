"""The PyTorch example's loop on the run's own text, so that it reads nothing that is held out.

regions: [{name: torch, trainer: {command: ["{python}", -m, tests.verify.trainers.torch_text]}}]
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from diloco_cli import Region
from diloco_cli.data import datasets
from diloco_cli.region.names import transformers_names
from diloco_cli.region.torch_weights import TorchOptimizer, TorchWeights

OTHER_ORDER = 1000
"""Added to the run's seed: the built-in trainers divide the order of that seed among them."""


def main() -> None:
    torch.set_num_threads(1)
    region = Region.here()
    spec = region.settings()
    inner = spec.inner_of("torch")
    config, names = transformers_names(spec.model, sequence=inner.sequence)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).train()
    optimizer = inner.optimizer
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer["lr"],
        betas=(optimizer["beta1"], optimizer["beta2"]),
        weight_decay=optimizer["decay"],
    )
    dataset = datasets.build(spec.data)
    stream = dataset.open(spec.seed + OTHER_ORDER, inner.batch, inner.sequence)
    with region.join(TorchWeights(model, names=names), optimizer=TorchOptimizer(adam)) as outer:
        position = outer.cursor.get("position", 0)
        while outer.go_on():
            rows, _ = stream.batch(stream.start(position))
            tokens = torch.from_numpy(rows).long()
            logits = model(tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            adam.step()
            position += inner.batch
            outer.stepped(
                tokens=inner.batch * inner.sequence, loss=loss, cursor={"position": position}
            )


if __name__ == "__main__":
    main()
