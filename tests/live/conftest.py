from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests.live.processes import Live


@pytest.fixture
def live(tmp_path) -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def begin(*regions: dict[str, Any], **changes: Any) -> Live:
        made.append(Live(tmp_path / "run", list(regions), **changes))
        return made[-1]

    yield begin
    for one in made:
        one.launcher.stop(one.started, grace=0.0)
        for region in one.spec.regions:  # A trainer may outlive its agent.
            end_trainer(Mailbox(one.folder / "regions" / region.name))
