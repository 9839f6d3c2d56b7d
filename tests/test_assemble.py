"""Names become things: every wrong kind is located, and what must be shared is compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diloco_cli import assemble
from diloco_cli.spec.load import Problem, SpecErrors
from diloco_cli.spec.schema import RunSpec

SMOKE = Path(__file__).parent.parent / "pipelines" / "smoke.yaml"


def spec(*overrides: str) -> RunSpec:
    return assemble.load_run(SMOKE, overrides).spec


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(SpecErrors) as caught:
        assemble.load_run(SMOKE, overrides)
    return caught.value.problems


def test_a_spec_becomes_parts_that_fit_together():
    parts = assemble.resolve(spec())
    sizes = [tensor.size for tensor in parts.model.tensors()]
    assert parts.layout.size == sum(sizes)
    assert len(parts.layout.fragments) == 2


@pytest.mark.parametrize(
    "override, key",
    [
        ("model.kind=decodr", "model.kind"),
        ("model.widht=3", "model.widht"),
        ("data={kind: text}", "data.files"),
        ("inner.optimizer.kind=adam", "inner.optimizer.kind"),
        ("inner.schedule.warmup=-1", "inner.schedule.warmup"),
        ("merge.kind=mode", "merge.kind"),
        ("outer.momentum=1", "outer.momentum"),
        ("wire.up.block=x", "wire.up.block"),
        ("wire.down={}", "wire.down.kind"),
        ("server.store.kind=tape", "server.store.kind"),
        ("regions.1.data={kind: txt}", "regions.1.data.kind"),
        ("regions.1.inner={optimizer: {lr: 1}}", "regions.1.inner.optimizer.kind"),
        ("plugins=[no_such_module_here]", "plugins.0"),
        ("model.vocabulary=99", "model.vocabulary"),
        ("data={kind: python-source, lanes: 1}", "data.lanes"),
    ],
)
def test_a_wrong_choice_is_located_at_its_key(override: str, key: str):
    (found,) = problems(override)
    assert (found.key, found.file) == (key, f"--set {override}")


def test_a_mesh_whose_tensor_does_not_divide_the_heads_is_refused_for_each_kind_of_them():
    heads = "model={kind: decoder, layers: 2, width: 32, heads: 4, kv_heads: 2}"
    assert spec(heads, "regions.1.mesh={tensor: 2}").region("right").devices_by_axis.tensor == 2
    (found,) = problems(heads, "regions.1.mesh={tensor: 4}")
    assert found.key == "regions.1.mesh.tensor"
    assert found.message == "is 4, which does not divide the model's 2 kv_heads"
    assert len(problems(heads, "regions.1.mesh={tensor: 8}")) == 2


@pytest.mark.parametrize(
    "model, tensor, option",
    [
        ("{kind: gemma4, size: tiny, vocabulary: 256}", 2, "1 full_kv_heads"),
        ("{kind: decoder, width: 32, heads: 4, ffn: 6, experts: 3, active: 1}", 4, "6 ffn"),
    ],
)
def test_what_tensor_must_divide_in_other_families(model: str, tensor: int, option: str):
    (found,) = problems(f"model={model}", f"regions.1.mesh={{tensor: {tensor}}}")
    assert found.message == f"is {tensor}, which does not divide the model's {option}"
    # Three experts are cut alike, so that two devices share each of them.
    assert spec(f"model={model}", f"regions.1.mesh={{fsdp: {tensor}}}", "inner.batch=8")


def test_a_model_that_says_nothing_of_its_parts_trains_in_the_plain_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a_simple_model.py").write_text(
        "from dataclasses import dataclass\n"
        "from diloco_cli.models import models\n"
        "from diloco_cli.models.decoder import Decoder\n"
        "@models.register('simple')\n"
        "@dataclass(frozen=True)\n"
        "class Simple:\n"
        '    """Has tensors and a loss."""\n'
        "    def tensors(self): return Decoder('tiny').tensors()\n"
        "    def init(self, seed): return Decoder('tiny').init(seed)\n"
        "    def loss_fn(self, *, penalties=True, form=None): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(assemble.models, "_choices", dict(assemble.models._choices))
    simple = ("plugins=[a_simple_model]", "model={kind: simple}")
    try:
        spec(*simple, "regions.1.devices=2")
        (tensor,) = problems(*simple, "regions.1.mesh={tensor: 2}")
        assert tensor.key == "regions.1.mesh.tensor" and "does not say how" in tensor.message
        (form,) = problems(*simple, "regions.1.inner={remat: block}")
        assert form.key == "regions.1.inner.remat" and "in one way only" in form.message
    finally:
        sys.modules.pop("a_simple_model", None)


@pytest.mark.parametrize(
    "override, key",
    [
        ("model={kind: decoder, width: 100_000_000, heads: 1, layers: 2}", "model"),
        ("model={kind: decoder, layers: 1_000_000_000}", "model.layers"),
    ],
)
def test_a_model_that_no_machine_can_hold_is_refused(override: str, key: str):
    (found,) = problems(override)
    assert found.key == key and "more than the" in found.message


def test_more_fragments_than_the_model_has_rows_are_refused():
    (found,) = problems("sync={fragments: 5000, every: 5000}", "budget.tokens=1e9")
    assert found.key == "sync.fragments"
    assert "is 5000, more than this model can fill" in found.message


def test_wrong_kinds_and_wrong_values_are_reported_together():
    found = problems("merge.kind=mode", "sync.quorum=9", "inner.batch=x")
    assert {problem.key for problem in found} == {"merge.kind", "sync.quorum", "inner.batch"}


def test_a_section_that_cannot_be_read_says_nothing_about_its_kind():
    assert [problem.key for problem in problems("merge=radial")] == ["merge"]


def test_a_plugin_may_bring_its_own_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a_lab_of_ours.py").write_text(
        "from dataclasses import dataclass\n"
        "from diloco_cli.merge import merge_rules\n"
        "from diloco_cli.merge.rules import Mean\n"
        "@merge_rules.register('ours')\n"
        "@dataclass(frozen=True)\n"
        "class Ours(Mean):\n"
        "    taste: float = 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        assemble.merge_rules, "_choices", dict(assemble.merge_rules._choices), raising=True
    )
    try:
        ours = spec("plugins=[a_lab_of_ours]", "merge.kind=ours")
        assert assemble.spelled_out(ours).merge == {"kind": "ours", "taste": 0.5}
    finally:
        sys.modules.pop("a_lab_of_ours", None)


def test_spelling_out_names_every_option_and_changes_nothing():
    short, full = spec(), assemble.spelled_out(spec())
    assert full.inner.optimizer["beta1"] == 0.9
    assert assemble.spelled_out(full) == full
    assert assemble.resolve(full) == assemble.resolve(short)


def test_the_digest_is_of_what_the_run_means_not_of_how_it_is_written():
    meant = assemble.shared_digest(spec())
    assert assemble.shared_digest(spec("wire.up={kind: int4}")) == meant
    assert assemble.shared_digest(spec("outer={kind: nesterov, lr: 0.5}")) != meant
    assert assemble.shared_digest(spec("wire.rate_limit=5Mbit")) == meant, "a region's own affair"


@pytest.mark.parametrize(
    "own",
    [
        "inner.batch=4",
        "inner={compute: bfloat16, remat: block, loss_chunks: 2, attention: xla}",
        "regions.0.speed=0.5",
        "regions.0.mesh={data: 2, fsdp: 2, tensor: 2}",
        "server.listen='127.0.0.1:1'",
        "data.limit=2e6",
    ],
)
def test_what_is_a_regions_own_is_not_shared(own: str):
    assert assemble.shared_digest(spec(own)) == assemble.shared_digest(spec())


@pytest.mark.parametrize(
    "common", ["seed=1", "budget.tokens=200_000", "sync.every=9", "model.layers=3", "wire.zstd=2"]
)
def test_what_must_be_shared_changes_the_digest(common: str):
    assert assemble.shared_digest(spec(common)) != assemble.shared_digest(spec())
