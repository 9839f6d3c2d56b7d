"""Presets repeat what was published; the long ones run whole under `make rehearse`."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from diloco_cli.bench.published import goodput as preset_goodput
from diloco_cli.bench.published.bandwidth import streaming_table4
from diloco_cli.bench.published.goodput import CHIPS, ELASTIC, RIGID, TABLE1, YEAR, goodput, hetero
from diloco_cli.bench.published.verdict import PublishedGoal, Verdict
from diloco_cli.sim import overlap
from diloco_cli.sim.faults import Fault
from diloco_cli.sim.network import Link
from diloco_cli.sim.overlap import (
    Buckets,
    ReductionJob,
    bucket_rate,
    bucket_utilisation,
    utilisation,
)
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario, even
from diloco_cli.sim.synchronous import synchronous
from diloco_cli.spec.schema import SyncSpec
from tests import ROOT


def test_the_streaming_table_agrees():
    verdict = streaming_table4()
    assert verdict.met, verdict.misses
    assert sum(len(row) for row in verdict.rows.values()) == 75


def test_another_size_would_not_agree(monkeypatch: pytest.MonkeyPatch):
    """The goal can be missed: twice the bits miss it."""
    monkeypatch.setattr("diloco_cli.bench.published.bandwidth.EFFECTIVE", 1.7)
    verdict = streaming_table4()
    assert not verdict.met
    assert verdict.misses


@pytest.mark.parametrize("sites, target, published", [(2, 0.90, 104.0), (8, 0.95, 198.0)])
def test_data_parallel_needs_what_was_published(sites: int, target: float, published: float):
    assert bucket_rate(Buckets(5e9, 1.0, sites), target) / 1e9 == pytest.approx(published, rel=0.01)


def test_buckets_obey_their_closed_form():
    job = Buckets(5e9, 1.0, 2)
    for target in (0.5, 0.8, 0.95):
        rate = job.volume / (1 / target - 1 / 3 - 2 / (3 * job.buckets))
        assert bucket_utilisation(job, rate) == pytest.approx(target, abs=0.01)


def test_a_wide_line_costs_nothing_and_a_narrow_one_everything():
    job = ReductionJob(16e9, 24, 0.1)
    wide, narrow = utilisation(job, np.array([1e15, 1e6]))
    assert wide == pytest.approx(1.0, abs=1e-4)
    assert narrow < 0.001
    assert overlap.needed(job, 0.5) < overlap.needed(job, 0.99)


@pytest.mark.parametrize(
    "learners, fitted, place", [(1, RIGID, 3), (1, ELASTIC, 3), (2, ELASTIC, 4), (8, ELASTIC, 3)]
)
def test_cells_of_the_goodput_table_come_from_events(
    learners: int, fitted: tuple[float, float], place: int
):
    step, still = fitted
    found = goodput(CHIPS[place], learners, *fitted, seed=0, seconds=60_000.0 / learners)
    fails = 1 - math.exp(-CHIPS[place] / learners / YEAR * step)
    assert found == pytest.approx(1 / (1 + still * fails / step), abs=0.02)
    row = TABLE1[
        "dp-rigid" if fitted is RIGID else f"M={learners}" if learners > 1 else "dp-elastic"
    ]
    assert 100 * found == pytest.approx(row[place], abs=4.0)


def test_grace_is_what_makes_a_quorum_of_one_usable():
    verdict = hetero(seconds=200.0)
    assert verdict.met, verdict.rows


def test_one_job_of_everybody_suffers_from_anybodys_failure():
    sites = tuple(RegionSite(f"r{n}", 1.0, 1.0, Link(1e12)) for n in range(4))
    faults = tuple(Fault(100.0 * n, "kill-trainer", f"r{n % 4}") for n in range(1, 10))
    scenario = Scenario(
        "t", sites, even(1e6, 4), SyncSpec(), 1000.0, recovery=Recovery(2.0, 18.0), faults=faults
    )
    rigid, elastic = (synchronous(scenario, elastic=way) for way in (False, True))
    # Nine failures of 20 s, and the time back to a checkpoint every 20 s, of 1000 s.
    assert rigid.uptime == pytest.approx(1 - 9 * 20 / 1000, abs=0.1)
    assert rigid.goodput < elastic.goodput < 1.0


def test_a_verdict_says_whether_its_goals_are_met():
    missed = Verdict("t", "", ("a",), {"r": [1.0]}, goals=(PublishedGoal("g", 3.0, 4.0),))
    assert not missed.met
    assert Verdict("t", "", ("a",), {}, goals=(PublishedGoal("g", 3.0, 4.0, lower=True),)).met


def test_many_regions_need_little_and_no_accelerator_library():
    code = (
        "from diloco_cli.bench.published.scale import planet\n"
        "import sys\n"
        "found = planet(regions=100, hours=0.2)\n"
        "assert found.rows['versions'][0] > 10, found.rows\n"
        "assert not {'jax', 'flax', 'optax', 'numba'} & set(sys.modules)\n"
        "print({goal.name: goal.value for goal in found.goals}['memory at the peak'] < 0.5)"
    )
    told = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert told.strip() == "True"


def test_the_fits_are_what_the_page_says():
    page = (ROOT / "docs" / "concepts" / "simulator.md").read_text()
    for step, still in (preset_goodput.RIGID, preset_goodput.ELASTIC):
        assert f"{step:g} s" in page and f"{still:g} s" in page
