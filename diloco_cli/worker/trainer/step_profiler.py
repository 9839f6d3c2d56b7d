"""A trace of some inner steps, for whoever asks for one while the region trains.

    idle ──request──▶ tracing ──after its last step, or when the trainer leaves──▶ answered

A request is taken once: a trainer that dies with it is not succeeded by one that traces.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from diloco_cli.worker.engines import Engine
from diloco_cli.worker.mailbox import Mailbox, ProfileAnswer, ProfileRequest


class StepProfiler:
    def __init__(self, mailbox: Mailbox, engine: Engine) -> None:
        self._mailbox, self._engine = mailbox, engine
        self._request: ProfileRequest | None = None
        self._steps = 0

    @property
    def is_tracing(self) -> bool:
        return self._request is not None

    def begin(self) -> bool:
        """Takes up what is asked for; says whether a trace begins."""
        if (request := self._mailbox.take_profile_request()) is None:
            return False
        try:
            self._engine.start_trace(Path(request.folder))
        except (OSError, RuntimeError) as error:
            self._answer(ProfileAnswer(request.id, 0, f"{error}"))
            return False
        self._request, self._steps = request, 0
        return True

    def stepped(self) -> bool:
        """Counts a step that was made; says whether the trace ends with it."""
        if self._request is None:
            return False
        self._steps += 1
        if self._steps < self._request.steps:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Ends the trace, if there is one, however many steps it has."""
        request, self._request = self._request, None
        if request is None:
            return
        error = ""
        try:
            self._engine.stop_trace()
        except (OSError, RuntimeError) as failure:
            error = f"{failure}"
        self._answer(ProfileAnswer(request.id, self._steps, error))

    def _answer(self, answer: ProfileAnswer) -> None:
        with contextlib.suppress(OSError):  # A full disk costs the answer, not the training.
            self._mailbox.answer_profile(answer)
