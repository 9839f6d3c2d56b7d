"""Memory that is used again, and never while somebody looks at it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from diloco_cli.wire import buffers
from diloco_cli.wire.buffers import MOST_SPARE, SMALL, fresh


@pytest.fixture(autouse=True)
def nothing_spare():
    gc.collect()
    buffers._spare.clear()
    yield
    buffers._spare.clear()


def place(vector: np.ndarray) -> int:
    return vector.__array_interface__["data"][0]


def test_the_memory_of_a_vector_that_is_gone_becomes_the_next():
    first = fresh(SMALL)
    where = place(first)
    del first
    again = fresh(SMALL)
    assert place(again) == where and again.shape == (SMALL,) and again.dtype == np.float32
    assert again.flags.writeable and again.flags.c_contiguous and again.flags.aligned


def looks(vector: np.ndarray) -> dict[str, Any]:
    return {
        "a view": vector[3:9],
        "a view of a view": vector[3:900].reshape(-1, 3)[1:],
        "other types": vector.view(np.uint8),
        "bytes": vector.data.cast("B"),
        "bytes of a part": vector[5:8].data,
        "what is contiguous already": np.ascontiguousarray(vector),
        "what is required": np.require(vector, np.float32, ["C", "A", "W"]),
    }


@pytest.mark.parametrize("how", looks(np.zeros(SMALL, np.float32)))
def test_whoever_still_looks_at_it_keeps_it(how):
    first = fresh(SMALL)
    first[:] = 7.0
    kept = looks(first)[how]
    before = bytes(kept)
    del first
    gc.collect()
    other = fresh(SMALL)
    other[:] = -1.0
    assert bytes(kept) == before
    del kept
    gc.collect()
    assert len(buffers._spare) == 1


def test_only_as_much_is_spare_as_a_version_needs_and_sizes_fit():
    many = [fresh(SMALL + number) for number in range(MOST_SPARE + 3)]
    del many
    gc.collect()
    assert len(buffers._spare) == MOST_SPARE
    blocks = {place(block) for block in buffers._spare}
    assert place(fresh(int(1.05 * SMALL))) in blocks, "a little larger"
    gc.collect()
    assert place(fresh(SMALL)) in blocks, "a little smaller"
    larger = fresh(3 * SMALL)
    assert larger.size == 3 * SMALL and not buffers._spare, "what does not fit makes room"
    del larger
    gc.collect()
    assert len(buffers._spare) == 1
    buffers._spare.append(np.empty(9 * SMALL, np.float32))
    buffers._spare.popleft()
    fresh(SMALL)
    assert [block.size for block in buffers._spare] == [int(1.05 * SMALL)], "that was far too large"


def test_small_vectors_are_plain_ones():
    assert fresh(SMALL - 1).base is None and fresh(0).size == 0


def test_threads_never_get_the_same_memory():
    wrong = []

    def work(number: int) -> None:
        for turn in range(60):
            mine = fresh(SMALL)
            mine[:] = 1000 * number + turn
            if not (mine == 1000 * number + turn).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
