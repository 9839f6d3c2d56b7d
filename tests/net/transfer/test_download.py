"""Memory for what is fetched."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest

from diloco_cli.net.transfer.download import HUGE_PAGE_BYTES, fresh

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [0, 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 5_000_001])
def test_fresh_memory_can_be_written_from_end_to_end(size):
    room = fresh(size)
    assert len(room) == size and not room.readonly
    room[:] = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert bytes(room[:256]) == (bytes(range(256)) if size >= 256 else bytes(size))


def test_fresh_memory_comes_in_large_pages():
    """Page by page, 64 MB are 16,000 faults, which take longer than a fast link."""
    if not THP.exists() or "[never]" in THP.read_text():
        pytest.skip("this system has none")
    size = 64 << 20
    plain = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain.madvise(mmap.MADV_HUGEPAGE)
    if faults(memoryview(plain)) >= size // 4096 // 2:
        pytest.skip("memory is in too many pieces here")
    assert faults(fresh(size)) < size // 4096 // 2


def faults(room: memoryview) -> int:
    """How often the system has to be asked for pages while the room is filled."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(0, len(room), 4096):
        room[at] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_too_little_memory_is_called_that():
    with pytest.raises(MemoryError, match="bytes for a body"):
        fresh(1 << 60)
