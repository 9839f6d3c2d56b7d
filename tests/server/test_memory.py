"""What the server's memory is not filled with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.server.store.draft import Draft
from tests import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at in /proc")

FORGET = """
import numpy as np
from diloco_cli.system.malloc import release_compiler
from diloco_cli.wire.kernels import block as kernels
from tests.server.test_memory import resident

kernels.encode_int4.compile()
before = resident("self", "llvmlite")
assert release_compiler() > 0
print(before - resident("self", "llvmlite"))
kernels.decode_int4.compile()  # One more is loaded, and both work.
kernels.fold_int4.compile()
values, body = np.linspace(-7, 7, 512, dtype=np.float32), np.zeros(258, np.uint8)
back = np.zeros(512, np.float32)
assert kernels.encode_int4(values, body, 512, 0, 1) == kernels.FINE
assert kernels.decode_int4(body, back, 512, 0, 1) == kernels.FINE
assert abs(back - values).max() < 0.6
"""


def resident(pid: int | str, name: str) -> float:
    """Megabytes of files of this name that a process has in memory."""
    found, here = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.partition(" ")[0].endswith(":"):
            here = name in line
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found / 1e3


def test_a_compiler_that_is_forgotten_still_works():
    done = subprocess.run([sys.executable, "-c", FORGET], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 20


READY = """
from diloco_cli.bench.support.one_fragment_server import made_up
from diloco_cli.server.lifecycle import _get_ready
from diloco_cli.merge import kernels as merge_kernels
from diloco_cli.wire.kernels import block as kernels
from tests.server.test_memory import resident

_get_ready(made_up(1000, {"kind": "int4"}))
loaded = [kernel._machine is not None for kernel in (kernels.fold_int4, merge_kernels.descend)]
print(resident("self", "llvmlite"), all(loaded))
"""


def test_a_server_that_is_ready_has_what_merges_need_and_no_compiler():
    done = subprocess.run([sys.executable, "-c", READY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    left, loaded = done.stdout.split()
    assert float(left) < 40 and loaded == "True"


def test_a_draft_at_rest_has_its_bytes_and_takes_no_memory(tmp_path):
    data = bytes(range(256)) * 4096
    draft = Draft(tmp_path / "draft-at-rest")  # A name that no other mapping has.
    draft.write(data)
    view = draft.view()
    assert view == data and resident("self", "draft-at-rest") > 0.9
    draft.release_pages()
    assert resident("self", "draft-at-rest") == 0
    assert view == data
    draft.discard()
    draft.release_pages()  # Nothing to release.
