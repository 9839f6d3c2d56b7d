"""How fast a device is, and how far a region is from that, follows from shapes and kinds."""

import pytest

from diloco_cli.models.decoder import Decoder
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines import StepCost
from diloco_cli.worker.engines.accelerators import ACCELERATORS, known
from diloco_cli.worker.engines.devices import memory_in_use, peak_of
from diloco_cli.worker.engines.jax_engine import cost_of, make_step
from diloco_cli.worker.engines.learning_rate import RatePlan


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA GB200", None),
        ("cpu", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_devices_are_known_by_what_jax_calls_them(kind, name):
    found = known(kind)
    assert (found.name if found else None) == name


def test_names_are_said_once():
    names = [one.name for one in ACCELERATORS]
    assert len(names) == len(set(names))


def test_mfu_is_the_share_of_the_peak_of_all_devices():
    cost = StepCost(flops=8e15, devices=8, peak=1e15)
    assert cost.tflops(0.5) == pytest.approx(500)
    assert cost.mfu(0.5) == pytest.approx(0.5)


def test_a_device_of_an_unknown_kind_has_operations_and_no_mfu():
    cost = StepCost(flops=2e12)
    assert cost.tflops(3.0) == pytest.approx(6) and cost.mfu(3.0) is None


class Device:
    def __init__(self, kind: str, used: int | None = None) -> None:
        self.device_kind = kind
        self._stats = None if used is None else {"bytes_in_use": used}

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def test_the_fullest_device_counts():
    assert memory_in_use([Device("x", 5), Device("x", 9)]) == 9
    assert memory_in_use([Device("cpu")]) is None
    assert peak_of([Device("TPU v5 lite")]) == 197e12


class NameAndLoss:
    """A model that does not describe itself."""

    def tensors(self):
        return Decoder("tiny").tensors()

    def init(self, seed):
        return Decoder("tiny").init(seed)

    def loss_fn(self, *, penalties=True, form=None): ...


def test_operations_of_a_model_that_does_not_say_are_six_a_weight_and_token():
    inner, weights = InnerSpec(batch=2, sequence=8), sum(t.size for t in Decoder("tiny").tensors())
    assert cost_of(NameAndLoss(), inner, [Device("cpu")]).flops == 6 * 16 * weights  # pyright: ignore[reportArgumentType]


def test_a_step_knows_what_it_costs():
    model, inner = Decoder("tiny"), InnerSpec(batch=2, sequence=8)
    step = make_step(model, inner, RatePlan.of(inner, 10))
    assert step.cost == StepCost(model.step_flops(2, 8), 1, None)
    assert step.engine().memory() is None
