"""What newcomers write is answered with what to write instead."""

from __future__ import annotations

import pytest

from diloco_cli.assemble import faults
from diloco_cli.spec.load import SpecErrors, parse_spec

BASE = {
    "spec": "1",
    "name": "tiny",
    "budget": "{tokens: 300_000}",
    "regions": "[{name: left}]",
}


def problems(**changed: str) -> list[tuple[str, str, str | None]]:
    text = "\n".join(f"{key}: {value}" for key, value in (BASE | changed).items())
    with pytest.raises(SpecErrors) as refused:
        parse_spec(text, "x.yaml", also=faults)
    return [(each.key, each.message, each.hint) for each in refused.value.problems]


@pytest.mark.parametrize(
    "section, value, key, hint",
    [
        ("server", "{listen: 7350}", "server.listen", "It is HOST:PORT, as in 127.0.0.1:7350."),
        ("wire", "{up: fp16}", "wire.up", "Write {kind: fp16}."),
        ("budget", "100000", "budget", "Write {tokens: 100000}."),
        ("data", "{kind: text, files: corpus}", "data.files", "Write [corpus]."),
        (
            "data",
            "{kind: text, files: [a], tokenizer: tokenizer.json}",
            "data.tokenizer",
            "Write {kind: hf, file: tokenizer.json}.",
        ),
        ("inner", "{learning_rate: 3e-4}", "inner.learning_rate", "It is `inner.optimizer.lr`."),
        ("name", "7", "name", "Put it in quotes."),
    ],
)
def test_a_wrong_form_is_answered_with_the_right_one(section, value, key, hint):
    assert [(where, what) for where, _, what in problems(**{section: value})] == [(key, hint)]


@pytest.mark.parametrize(
    "schedule, hint",
    [
        ("{kind: wsd, warmup: 50}", "It is a share of the run, as in 0.01; the warm-up of other"),
        ("{kind: cosine, warmup: 0.01}", "It counts steps of the run, as in 50; the warm-up of"),
        ("{kind: constant, warmup: -1}", "It counts steps of the run, as in 50; the warm-up of"),
    ],
)
def test_a_warm_up_in_the_wrong_unit_is_answered_with_the_right_one(schedule: str, hint: str):
    ((key, _, said),) = problems(inner=f"{{schedule: {schedule}}}")
    assert key == "inner.schedule.warmup" and (said or "").startswith(hint)


@pytest.mark.parametrize(
    "section, value, key, said",
    [
        ("outer", "{kind: nesterov, lr: 1e30}", "outer.lr", "must be at most 10; got 1e+30"),
        ("outer", "{kind: sgd, lr: 11}", "outer.lr", "must be at most 10; got 11"),
        ("outer", "{kind: nesterov, warmup: 1000000001}", "outer.warmup", "at most 1000000; got"),
        ("outer", "{kind: adam, epsilon: 2.0}", "outer.epsilon", "must be at most 1; got 2.0"),
        ("outer", "{kind: nesterov, ema: nan}", "outer.ema", "needs a finite number; got 'nan'"),
        ("inner", "{optimizer: {kind: adamw, lr: 1e9}}", "inner.optimizer.lr", "at most 10; got"),
        ("inner", "{optimizer: {kind: sgd, lr: inf}}", "inner.optimizer.lr", "a finite number"),
        ("inner", "{optimizer: {kind: adamw, decay: inf}}", "inner.optimizer.decay", "finite"),
    ],
)
def test_a_number_far_beyond_any_use_is_refused(section, value, key, said):
    ((where, message, _),) = problems(**{section: value})
    assert where == key and said in message


def test_a_list_of_wrong_entries_is_not_also_called_empty():
    found = problems(regions="[paris, tokyo]")
    assert [key for key, *_ in found] == ["regions.0", "regions.1"]
    assert found[0][2] == "Write {name: paris}."
    assert "needs at least 1" in problems(regions="[]")[0][1]
