"""One guarded server for the tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.security.tls_server import Guarded, Vault, start


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    running = start(tmp_path_factory.mktemp("guarded"), None)
    yield running
    running.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    """Starts servers that a test may change and stop."""
    running: list[Guarded] = []

    def make(vault: Vault | None = None, **changes: Any) -> Guarded:
        running.append(start(tmp_path / f"run{len(running)}", vault, **changes))
        return running[-1]

    yield make
    for one in running:
        one.close()
