"""A run may live in a folder of its own, and in no other."""

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.run.folder import refuse_foreign


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not lose this")
    with pytest.raises(SpecError, match=r"is not a run folder: it holds thesis\.tex"):
        refuse_foreign(tmp_path)


def test_a_start_that_could_write_nothing_is_no_obstacle(tmp_path):
    """A worker on a full disk leaves its lock and nothing in it; with room it goes on."""
    region = tmp_path / "regions" / "left"
    region.mkdir(parents=True)
    (region / "lock").touch()
    refuse_foreign(tmp_path)
    (region / "checkpoint.safetensors").write_bytes(b"work")
    with pytest.raises(SpecError, match="is not a run folder"):
        refuse_foreign(tmp_path)
