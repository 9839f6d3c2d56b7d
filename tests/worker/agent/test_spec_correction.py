"""A worker may correct its spec only where the server says that nothing was trained with it."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_cli.errors import SpecError
from diloco_cli.spec.resolved import read_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.agent.spec_correction import keep_or_correct
from diloco_cli.worker.mailbox import FolderOwner, Image, Mailbox


def spec_of(seed: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "spec": 1,
            "name": "tiny",
            "seed": seed,
            "budget": {"tokens": 1_000_000},
            "regions": [{"name": "paris"}, {"name": "oslo"}],
        }
    )


@pytest.fixture
def mailbox(tmp_path):
    assert keep_or_correct(spec_of(0), tmp_path) is None
    mailbox = Mailbox(tmp_path / "regions" / "paris")
    mailbox.prepare()
    return mailbox


def test_the_spec_is_corrected_once_the_server_has_begun_anew(mailbox, tmp_path):
    mailbox.write_identity(FolderOwner("me", 1, "run-0"))
    correction = keep_or_correct(spec_of(1), tmp_path)
    assert correction and read_resolved(tmp_path).seed == 0
    with pytest.raises(SpecError, match="holds a run of another spec"):
        correction.make(())
    assert read_resolved(tmp_path).seed == 0
    correction.make(("run-0",))
    assert read_resolved(tmp_path).seed == 1
    assert keep_or_correct(spec_of(1), tmp_path) is None


def test_a_region_that_never_joined_takes_any_spec(mailbox, tmp_path):
    mailbox.write_identity(FolderOwner("me", 1))
    correction = keep_or_correct(spec_of(1), tmp_path)
    assert correction
    correction.make(())
    assert read_resolved(tmp_path).seed == 1


def test_another_region_of_the_host_that_is_in_the_run_keeps_its_spec(mailbox, tmp_path):
    other = Mailbox(tmp_path / "regions" / "oslo")
    other.prepare()
    other.write_identity(FolderOwner("other", 1, "run-1"))
    correction = keep_or_correct(spec_of(1), tmp_path)
    assert correction
    with pytest.raises(SpecError, match="seed: 0 there, 1 here"):
        correction.make(("run-0",))


def test_where_something_was_trained_the_spec_is_refused_without_asking(mailbox, tmp_path):
    mailbox.write_image(1, Image(1, {}, "", np.zeros(4, np.float32)))
    with pytest.raises(SpecError, match="holds a run of another spec"):
        keep_or_correct(spec_of(1), tmp_path)
