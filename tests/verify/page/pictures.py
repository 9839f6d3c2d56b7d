"""Takes the pictures of page and report anew: python -m tests.verify.page.pictures

Runs the quickstart with a larger budget, looks at its page when most of it is merged, and at its
report when it is over. With --run FOLDER a run that is there already is looked at instead: its
page if it is served, and its report.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from diloco_cli.net.client import Client
from tests import ROOT
from tests.observe.page.browser import Watched, started

SPEC = ROOT / "pipelines" / "quickstart.yaml"
PICTURES = ROOT / "docs" / "pictures"
WIDTHS = (1440, 800, 390)
COLOURS = ("light", "dark")
BUDGET, SHARE = 2_400_000, 0.8
DEADLINE = 3600.0
PROMPT = "def __init__(self, "
DILOCO = (sys.executable, "-m", "diloco_cli")


def url_of(folder: Path) -> str:
    """Where the run of a folder is served; empty where it is not."""
    with suppress(OSError, ValueError):
        return json.loads((folder / "server" / "address.json").read_bytes())["url"]
    return ""


def wait_until_most_is_merged(folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if url := url_of(folder):
            with Client(url) as server:
                tokens = server.status().tokens
            if tokens.applied >= SHARE * tokens.budget:
                return
        time.sleep(1.0)
    raise TimeoutError(f"{folder} did not come far enough")


def take(browser: Any, url: str, name: str, width: int, colours: str) -> None:
    size = {"width": width, "height": 900}
    shown = Watched(browser, url, viewport=size, color_scheme=colours)
    path = PICTURES / f"{name}-{width}-{colours}.png"
    shown.tab.screenshot(path=str(path), full_page=True)
    shown.context.close()
    # Few colours are in them: a palette halves the bytes and nobody sees it.
    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e3:.0f} kB")


def page_of(browser: Any, folder: Path) -> None:
    for width in WIDTHS:
        for colours in COLOURS:
            take(browser, url_of(folder), "page", width, colours)


def report_of(browser: Any, folder: Path) -> None:
    # By names alone: the report says how it was asked for.
    file = folder.parent / "report.html"
    asked = ("report", folder.name, "--out", file.name, "--sample", PROMPT)
    subprocess.run((*DILOCO, *asked), check=True, cwd=folder.parent)
    for width, colours in ((1440, "light"), (390, "dark")):
        take(browser, file.resolve().as_uri(), "report", width, colours)
    file.unlink()


def cut_for_readme() -> None:
    """The first screen of page and report."""
    for name, height in (("page", 1040), ("report", 1240)):
        whole = Image.open(PICTURES / f"{name}-1440-light.png")
        whole.crop((0, 0, whole.width, height)).save(PICTURES / f"{name}.png", optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run that is there already")
    known: Path | None = parser.parse_args().run
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, started() as browser:
        folder = known or Path(made) / "quickstart"
        if known:
            if url_of(folder):
                page_of(browser, folder)
            report_of(browser, folder)
            cut_for_readme()
            return 0
        budget = f"budget.tokens={BUDGET}"
        child = subprocess.Popen((*DILOCO, "run", str(SPEC), "--dir", str(folder), "--set", budget))
        try:
            wait_until_most_is_merged(folder)
            page_of(browser, folder)
            child.wait(DEADLINE)
        finally:
            child.terminate()
            child.wait()
        report_of(browser, folder)
    cut_for_readme()
    return 0


if __name__ == "__main__":
    sys.exit(main())
