"""docs/reference/wire-format.md says what the code does."""

import re
from pathlib import Path

import numpy as np

from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.codecs.block import SCALE_FLOOR, largest_scale
from diloco_cli.wire.frame import CHUNK, FRAME_VERSION, MAGIC
from diloco_cli.wire.header import KEYS
from diloco_cli.wire.messages import EPOCH_HEADER, RUN_HEADER, WIRE_HEADER, WIRE_VERSION

PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()


def test_the_page_lists_exactly_the_keys_of_the_header():
    table = PAGE.split("## The header")[1].split("## Chunks")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted([*KEYS, "chunks"])


def test_the_page_describes_every_codec():
    chapter = PAGE.split("## Codecs")[1]
    titles = " ".join(line for line in chapter.splitlines() if line.startswith("### "))
    named = re.findall(r"`(\w+)`", titles)
    assert sorted(set(named) - {"block", "step", "density"}) == codecs.kinds()


def test_the_numbers_on_the_page_are_those_of_the_code():
    for top in (127, 7):
        constant = int((np.float32(1) / np.float32(top)).view(np.uint32))
        assert f"`{constant:08x}` for {top}" in PAGE
        assert f"`{largest_scale(top):04x}` for int" in PAGE
    constant = int((np.float32(1) / np.float32(32767)).view(np.uint32))
    assert f"`c` is `{constant:08x}`, the largest scale `{largest_scale(1):04x}`" in PAGE
    assert f"`{SCALE_FLOOR:04x}`" in PAGE
    assert f"magic `{MAGIC.hex(' ')}`" in PAGE
    assert f"frame version, {FRAME_VERSION}" in PAGE
    assert f"{CHUNK:,}".replace(",", " ") in PAGE
    for header in (RUN_HEADER, EPOCH_HEADER, f"{WIRE_HEADER}: {WIRE_VERSION}"):
        assert f"`{header}`" in PAGE
