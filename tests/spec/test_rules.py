"""A spec that loads can run: contradictions name both values, the consequence and the way out."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from diloco_cli.spec.load import parse_spec
from diloco_cli.spec.quantities import seconds_of
from diloco_cli.spec.rules import Conflicts
from diloco_cli.spec.schema import RunSpec
from tests.spec.short_spec import GOOD, loaded, problems, the_problem, with_line


def test_a_quorum_above_the_number_of_regions_is_refused():
    found = the_problem(with_line("quorum: 1", "quorum: 3"))
    assert found.message == "is 3 but regions lists 2, so no round could ever close"
    assert found.hint == "Set sync.quorum to 2 or less, or list more regions."
    assert problems(with_line("quorum: 1", "quorum: 2")) == []


def test_an_overlap_as_long_as_the_gap_between_sends_is_refused():
    found = the_problem(with_line("overlap: 2", "overlap: 24"))
    assert (found.key, found.line) == ("sync.overlap", 11)
    assert "is 24 but sync.every is 24" in found.message
    assert problems(with_line("overlap: 2", "overlap: 23")) == []


def test_two_regions_of_one_name_are_refused_at_the_second():
    found = the_problem(with_line("name: tokyo", "name: paris"))
    assert (found.key, found.line) == ("regions.1.name", 7)
    assert "regions.0.name" in found.message


def test_more_fragments_than_steps_between_sends_cannot_take_turns():
    assert the_problem(with_line("fragments: 4", "fragments: 25")).key == "sync.fragments"
    assert problems(with_line("fragments: 4", "fragments: 24")) == []


@pytest.mark.parametrize("tokens, fits", [(49_152, True), (49_151, False)])
def test_a_budget_below_one_round_is_refused(tokens: int, fits: bool):
    found = problems(with_line("4_000_000", str(tokens)))  # 24 steps of 16 sequences of 128.
    assert [problem.key for problem in found] == ([] if fits else ["budget.tokens"])


def test_a_budget_beyond_counting_is_refused():
    found = the_problem(with_line("4_000_000", str(10**18 + 1)))
    assert found.key == "budget.tokens" and "1,000,000,000,000,000,001" in found.message
    assert problems(with_line("4_000_000", str(10**18))) == []


def test_the_cheapest_round_counts_the_regions_with_the_smallest_batches():
    small = with_line("{name: tokyo}", "{name: tokyo, inner: {batch: 2}}")
    assert problems(small, "budget.tokens=6144") == []
    found = the_problem(small, "budget.tokens=6143")
    assert "is 6143 but one round takes at least 6144" in found.message
    assert the_problem(small, "budget.tokens=6144", "sync.quorum=2").key == "budget.tokens"


def test_a_quorum_that_needs_joiners_is_a_warning_where_others_may_join():
    text = with_line("quorum: 1", "quorum: 3")
    assert problems(text, "server.admit=open") == []
    (warning,) = parse_spec(text, "run.yaml", ["server.admit=open"]).warnings
    assert warning.key == "sync.quorum" and "before others have joined" in warning.message


@pytest.mark.parametrize(
    "admit, more, fault",
    [
        ("credentialed", (), "there are no credentials"),
        ("credentialed", ("server.certs=certs",), None),
        ("open", (), None),
        ("open", ("server.certs=certs",), "server.certs is given"),
        ("open", ("server.certs=certs", "server.listen=0.0.0.0:1"), "server.certs is given"),
    ],
)
def test_who_may_join_fits_how_the_server_is_reached(admit, more, fault):
    found = problems(GOOD, f"server.admit={admit}", *more)
    assert [it.key for it in found] == (["server.admit"] if fault else [])
    assert not fault or fault in found[0].message


@pytest.mark.parametrize(
    "text, seconds", [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800)]
)
def test_a_duration_has_a_unit(text: str, seconds: float):
    assert (
        seconds_of(text) == seconds == loaded(GOOD, f"server.forget={text}").server.forget_seconds
    )


@pytest.mark.parametrize("text", ["7", "0d", "7 weeks", "-1d", "d"])
def test_what_is_no_duration_is_refused_with_an_example(text: str):
    found = the_problem(GOOD, f"server.forget={text}")
    assert found.key == "server.forget" and found.hint and "12h or 7d" in found.hint


def test_a_region_is_not_retired_before_its_lease_is_over():
    found = the_problem(GOOD, "server.forget=10s")
    assert found.key == "server.forget" and "server.lease, 10 s" in found.message


@pytest.mark.parametrize("where", ["inner", "regions.1.inner"])
def test_a_batch_that_cannot_be_cut_evenly_is_refused_where_it_is_set(where: str):
    keys = [found.key for found in problems(GOOD, f"{where}={{batch: 10, accumulate: 4}}")]
    assert keys == [f"{where}.batch"]


def test_a_region_that_changes_only_accumulate_is_told_so():
    found = the_problem(GOOD, "regions.0.inner={accumulate: 3}")
    assert found.key == "regions.0.inner.accumulate"
    assert "batch 16 cannot be cut into accumulate 3" in found.message


def test_a_region_may_only_change_keys_of_inner():
    found = the_problem(with_line("{name: tokyo}", "{name: tokyo, inner: {bach: 8}}"))
    assert (found.line, found.column, found.key) == (7, 27, "regions.1.inner.bach")
    assert found.hint == "Did you mean `batch`?"
    found = the_problem(with_line("{name: tokyo}", "{name: tokyo, inner: {batch: 0}}"))
    assert found.message == "must be at least 1; got 0"


def test_a_region_trains_as_the_run_does_except_for_its_own_keys():
    spec = loaded(with_line("{name: tokyo}", "{name: tokyo, inner: {batch: 8}}"))
    assert (spec.inner_of("tokyo").batch, spec.inner_of("tokyo").sequence) == (8, 128)
    assert spec.inner_of("paris").batch == 16


def test_an_evaluator_that_is_no_region_is_refused():
    found = the_problem(GOOD + "evaluate: {region: tokio}\n")
    assert (found.key, found.hint) == ("evaluate.region", "Did you mean `tokyo`?")


@pytest.mark.parametrize(
    "options, wrong",
    [
        ("grace={kind: fixed, seconds: 3}", []),
        ("grace={kind: fixed, margin: 0.5}", ["sync.grace.margin"]),
        ("grace={kind: adaptive, seconds: 3}", ["sync.grace.seconds"]),
        (
            "grace={kind: none, margin: 0.5, seconds: 3}",
            ["sync.grace.margin", "sync.grace.seconds"],
        ),
        ("blend=0.5", ["sync.blend"]),
    ],
)
def test_an_option_without_effect_is_refused(options: str, wrong: list[str]):
    assert [found.key for found in problems(GOOD, f"sync.{options}")] == wrong


def test_a_blend_belongs_to_its_way_of_adopting():
    spec = loaded(GOOD, "sync.adopt=blend", "sync.blend=0.25")
    assert spec.sync.alpha == 0.25


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:80", "localhost:7350", "[::1]:7350"])
def test_this_machine_is_a_fine_place_to_listen(listen: str):
    assert problems(GOOD, f"server.listen='{listen}'") == []


@pytest.mark.parametrize(
    "listen", ["7350", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:65536", "::1:80", "a:b", ""]
)
def test_an_address_that_is_not_host_and_port_is_refused(listen: str):
    assert "which is not HOST:PORT" in the_problem(GOOD, f"server.listen='{listen}'").message


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:7350", "[::]:7350", "10.0.0.1:7350", "example.com:7350"]
)
def test_an_open_address_is_refused_until_there_are_credentials(listen: str):
    found = the_problem(GOOD, f"server.listen='{listen}'")
    assert "there is no server.certs" in found.message
    assert "diloco certs init" in (found.hint or "")
    assert problems(GOOD, f"server.listen='{listen}'", "server.certs=certs") == []


def test_a_token_comes_from_one_place():
    text = GOOD.replace("name: paris", "name: paris, token_file: a, token_env: B", 1)
    assert "token_file is given too" in the_problem(text).message


@pytest.mark.parametrize(
    "text, bits", [("50Mbit", 50e6), ("1.5Gbit/s", 1.5e9), ("800 kbit", 8e5), ("1bit", 1.0)]
)
def test_a_rate_limit_is_in_bits_a_second(text: str, bits: float):
    assert loaded(GOOD, f"wire.rate_limit={text}").wire.bits_per_second == bits


@pytest.mark.parametrize(
    "text, meant",
    [("50mbit", "50Mbit"), ("50MB", "50Mbit"), ("50Mbps", "50Mbit"), ("2GBIT/s", "2Gbit")],
)
def test_what_is_nearly_a_rate_is_refused_with_what_was_meant(text: str, meant: str):
    found = the_problem(GOOD, f"wire.rate_limit={text}")
    assert "wire.rate_limit" in str(found) and "is no rate" in found.message
    assert f"Did you mean `{meant}`?" in (found.hint or "")


@pytest.mark.parametrize("text", ["50", "0Mbit", "-5Mbit", "fast", "1e400Gbit", "''", "nanMbit"])
def test_what_is_no_rate_is_refused_with_an_example(text: str):
    found = the_problem(GOOD, f"wire.rate_limit={text}")
    assert "is no rate" in found.message and "50Mbit" in (found.hint or "")


def test_reserved_keys_must_stay_empty():
    assert problems(GOOD + "export: {}\n") == []
    assert "not available in this version" in the_problem(GOOD + "export: {a: 1}\n").message


# Devices


def with_tokyo(keys: str) -> str:
    return with_line("{name: tokyo}", f"{{name: tokyo, {keys}}}")


def test_devices_are_short_for_a_mesh_of_fsdp():
    spec = loaded(with_tokyo("devices: 4"))
    assert [region.devices_by_axis.size for region in spec.regions] == [1, 4]
    assert spec.region("tokyo").devices_by_axis.fsdp == 4
    whole = loaded(with_tokyo("mesh: {data: 2, fsdp: 4, tensor: 2}")).region("tokyo")
    assert whole.devices_by_axis.size == 16


def test_a_mesh_is_said_once():
    found = the_problem(with_tokyo("devices: 4, mesh: {fsdp: 4}"))
    assert found.key == "regions.1.devices" and "mesh is given too" in found.message


@pytest.mark.parametrize(
    "keys, at, parts",
    [
        ("devices: 3", "devices", "data 1 × fsdp 3 = 3 parts"),
        ("mesh: {data: 4, fsdp: 8}", "mesh", "data 4 × fsdp 8 = 32 parts"),
        ("devices: 8, inner: {accumulate: 4}", "devices", "fsdp 8 × accumulate 4 = 32 parts"),
    ],
)
def test_a_batch_that_cannot_be_dealt_out_is_refused_at_the_mesh(keys: str, at: str, parts: str):
    found = the_problem(with_tokyo(keys))
    assert found.key == f"regions.1.{at}" and parts in found.message
    assert "Make batch a multiple of" in (found.hint or "")


@pytest.mark.parametrize("hosts", ["hosts: 2", "hosts: 3, mesh: {data: 2, fsdp: 2}"])
def test_hosts_of_a_region_have_equal_parts_of_its_mesh(hosts):
    found = the_problem(with_tokyo(hosts))
    assert found.key == "regions.1.hosts" and "in equal parts" in found.message
    assert loaded(with_tokyo("hosts: 2, devices: 4")).region("tokyo").host_count == 2


def test_devices_of_one_tensor_group_share_their_sequences():
    assert problems(with_tokyo("mesh: {fsdp: 8, tensor: 64}")) == []


@pytest.mark.parametrize("where", ["inner", "regions.1.inner"])
def test_a_sequence_that_cannot_be_cut_is_refused_where_it_is_asked_for(where: str):
    found = the_problem(GOOD, f"{where}={{loss_chunks: 3}}")
    assert found.key == f"{where}.loss_chunks"
    assert "is 3, which does not cut a sequence of 128" in found.message


@pytest.mark.parametrize("where", ["inner", "regions.1.inner"])
def test_cudnn_is_for_bfloat16(where: str):
    found = the_problem(GOOD, f"{where}={{attention: cudnn}}")
    assert found.key == f"{where}.attention" and "bfloat16" in (found.hint or "")
    assert problems(GOOD, f"{where}={{attention: cudnn, compute: bfloat16}}") == []


def test_a_spec_made_in_code_is_held_to_the_same_rules():
    data = loaded().model_dump(exclude_unset=True) | {"sync": {"quorum": 5}}
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(data)
    clash = caught.value.errors()[0].get("ctx", {})["error"]
    assert isinstance(clash, Conflicts)
    assert [fault.path for fault in clash.faults] == [("sync", "quorum")]
