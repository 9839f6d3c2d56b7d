from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from processes import Live  # pyright: ignore[reportMissingImports]


@pytest.fixture
def live(tmp_path) -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def begin(*regions: dict[str, Any], **changes: Any) -> Live:
        made.append(Live(tmp_path / "run", list(regions), **changes))
        return made[-1]

    yield begin
    for one in made:
        one.launcher.stop(one.started, grace=0.0)
