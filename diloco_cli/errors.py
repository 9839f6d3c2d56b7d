"""Every failure a user can see, with what to do about it.

    DilocoError                exit code
      RunFailed                1   the run failed
      SpecError                2   the run spec, the command or the folder is wrong
        RegistryError          2   the spec names something that does not exist
      WireError                3   bytes from the other side cannot be trusted
      LinkError                4   the other side cannot be reached
      StoreError               5   durable state is missing or damaged
        StoreDamaged           5   and only a copy of the server folder helps
      QuorumLost               6   too few regions are left for any round to close

    129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM.

A message states the fact, with the values; the hint states the next action.
Only `cli/app.py` turns these into text; everything else lets them rise.
"""

from __future__ import annotations

from typing import ClassVar


class DilocoError(Exception):
    """Something went wrong that a person can do something about."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class RunFailed(DilocoError):
    """The run failed."""

    exit_code = 1


class SpecError(DilocoError):
    """The run spec, the command or the folder is wrong."""

    exit_code = 2


class RegistryError(SpecError):
    """A choice that does not exist; `key` is the option at fault, dotted where it is nested."""

    def __init__(self, message: str, *, hint: str | None = None, key: str = "kind") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class WireError(DilocoError):
    """Bytes from the other side cannot be trusted."""

    exit_code = 3


class LinkError(DilocoError):
    """The other side cannot be reached, or is in reach and cannot do it now."""

    exit_code = 4
    answered = False
    """It was reached, and said so itself."""


class StoreError(DilocoError):
    """Durable state is missing or damaged."""

    exit_code = 5


class StoreDamaged(StoreError):
    """Files of the server are missing or damaged: only a copy of its folder helps."""

    def __init__(
        self, message: str, *, hint: str = "Restore the server folder from a copy."
    ) -> None:
        super().__init__(message, hint=hint)


class QuorumLost(DilocoError):
    """Too few regions are left for any round to close."""

    exit_code = 6


SET_BACK = (
    "If no newer copy of the server's folder is left, declare the loss, on the server's host: "
    "`diloco restore COPY --dir FOLDER --set-back`; or lose less: `diloco restore --from-regions "
    "FOLDER… --and COPY --dir NEW`. Then start this region again: it goes on by itself."
)
"""What to do about a server that was restored from an older copy than its regions have seen."""
