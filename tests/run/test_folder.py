"""A run may live in a folder of its own, and in no other."""

import pytest

from diloco_cli.data.heldout import HeldoutFile, HeldoutText
from diloco_cli.errors import SpecError
from diloco_cli.run.folder import heldout_rows, refuse_foreign


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


def test_the_held_out_text_of_each_region_is_told_once_where_it_is_the_same(tmp_path):
    def listed(region: str, size: int) -> None:
        (tmp_path / "regions" / region).mkdir(parents=True)
        file = HeldoutFile("a.txt", size, 1000, 1.0)
        HeldoutText("/corpus", size, 1000, (file,)).write(
            tmp_path / "regions" / region / "heldout.json"
        )

    assert heldout_rows(tmp_path) == []
    listed("left", 50)
    listed("right", 50)
    (row,) = heldout_rows(tmp_path)
    assert row == ("held-out text", "the end of 1 file, 50 B, 5.0% of the text: a.txt 100%")
    listed("third", 80)
    assert [label for label, _ in heldout_rows(tmp_path)] == [
        "held-out text of left, right",
        "held-out text of third",
    ]
