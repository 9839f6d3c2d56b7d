"""Every kind of fault is listed once, and every reader of the list knows it."""

from typing import get_args

from diloco_cli.chaos import inflict
from diloco_cli.sim import simulator
from diloco_cli.spec.fault_kinds import FAULT_KINDS, Kind
from diloco_cli.spec.schema import FaultSpec


def test_every_kind_has_a_row_and_a_handler_live_and_simulated():
    kinds = set(get_args(Kind))
    assert set(FAULT_KINDS) == kinds
    assert set(inflict.HANDLERS) == kinds
    assert set(simulator.HANDLERS) == kinds


def test_a_key_of_one_kind_is_a_key_of_the_spec():
    keys = {row.key for row in FAULT_KINDS.values() if row.key}
    assert keys <= set(FaultSpec.model_fields)


def test_the_reference_explains_every_kind():
    from diloco_cli.spec.describe import keys_of

    [kind] = [key for key in keys_of(FaultSpec) if key.name == "kind"]
    assert [name for name in FAULT_KINDS if f"`{name}`" not in kind.doc] == []
