"""How much of the server one region may use at a time.

The size of a body follows from the model and is checked where it is read; these limits are
about many bodies at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco_cli.server.refusals import HttpRefusal

UPLOADS_PER_REGION = 8
"""At once. A worker uses up to four connections, and its successor may overlap with it."""

MODELS_PER_REGION = 2
"""Bytes on the way at once, counted in uploads of the whole model."""

JSON_SECONDS = 30.0
"""For a body of a few kilobytes to arrive."""


class Quota:
    """What each region has under way."""

    def __init__(
        self, model_bytes: Callable[[], int], *, uploads: int = UPLOADS_PER_REGION
    ) -> None:
        """`model_bytes` says how long an upload of the whole model may be now."""
        self._most_uploads, self._model_bytes = uploads, model_bytes
        self._uploads: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def taken(self, region: str, size: int) -> Iterator[None]:
        """Counts one upload while it lasts, or asks for patience."""
        uploads, total = self._uploads[region] + 1, self._bytes[region] + size
        if uploads > self._most_uploads:
            raise _busy(f"{region} has {uploads - 1} uploads under way, the most it may have.")
        most_bytes = MODELS_PER_REGION * self._model_bytes()
        if self._bytes[region] and total > most_bytes:
            raise _busy(
                f"{region} has {self._bytes[region]} bytes on the way, with this upload {total}; "
                f"at most {most_bytes} at once."
            )
        self._uploads[region] = uploads
        self._bytes[region] = total
        try:
            yield
        finally:
            self._uploads[region] -= 1
            self._bytes[region] -= size


def _busy(message: str) -> HttpRefusal:
    return HttpRefusal("busy", message, "It is sent again by itself.", headers={"retry-after": "2"})
