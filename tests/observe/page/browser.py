"""Chromium without a window, and what is wrong with a page it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",  # A test may be root, and shows only pages of its own.
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Where Chromium is; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return found


@contextmanager
def started() -> Iterator[Any]:
    """A browser; while it is there, this thread runs an event loop."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


class Watched:
    """A tab that writes down what goes wrong."""

    def __init__(self, browser: Any, url: str, *, allowed: str = "", **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.errors: list[str] = []
        self.outside: list[str] = []
        self._allowed = allowed or url
        self.tab.on("console", self._said)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", self._asked)
        # The stream of events never ends, so the page is never idle.
        self.tab.goto(url, wait_until="domcontentloaded")

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self._allowed, "data:")):
            self.outside.append(request.url)

    def unfit(self) -> list[str]:
        """What axe-core finds: the rule, and where."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.tab).response["violations"]
        return [
            f"{each['id']}: {node['html']} ({node['failureSummary']})"
            for each in found
            for node in each["nodes"]
        ]

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.tab.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
