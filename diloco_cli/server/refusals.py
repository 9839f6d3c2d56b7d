"""Every "no" of the server: a code for programs, a sentence and a hint for people."""

from __future__ import annotations

from typing import Any

from diloco_cli.wire.error_bodies import error_body

STATUS = {
    "bad-request": 400,
    "damaged": 400,
    "no-credential": 401,
    "unknown-credential": 401,
    "expired-credential": 401,
    "revoked-credential": 401,
    "wrong-role": 403,
    "other-region": 403,
    "retired": 403,
    "name-taken": 403,
    "not-found": 404,
    "not-allowed": 405,
    "too-slow": 408,
    "held": 409,
    "too-soon": 409,
    "full": 409,
    "older-copy": 409,
    "other-run": 409,
    "other-spec": 409,
    "unknown-region": 409,
    "server-behind": 409,
    "conflict": 409,
    "terms-changed": 409,
    "unconfirmed": 409,
    "incomplete": 409,
    "returned": 409,
    "foreign": 409,
    "gone": 410,
    "fenced": 412,
    "too-large": 413,
    "range": 416,
    "refused": 422,
    "not-amendable": 422,
    "mismatch": 422,
    "other-wire": 426,
    "too-many": 429,
    "failed": 500,
    "busy": 503,
    "closing": 503,
    "read-only": 503,
    "no-room": 507,
}
"""The HTTP status of each code."""


HEADERS = "Region calls carry `diloco-run`, `diloco-wire` and, for uploads, `diloco-epoch`."


class HttpRefusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        headers: dict[str, str] | None = None,
        **beside: Any,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.headers = headers
        self.beside = beside

    @property
    def status(self) -> int:
        return STATUS[self.code]

    @property
    def body(self) -> dict[str, object]:
        return error_body(self.code, self.message, self.hint, **self.beside)
