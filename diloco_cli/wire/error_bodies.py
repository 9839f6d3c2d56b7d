"""How an answer that is an error looks as JSON: what, in which words, with which hint."""

from __future__ import annotations

import json

from pydantic import BaseModel

from diloco_cli.wire.messages import JsonObject


def error_body(
    code: str, message: str, hint: str | None = None, **beside: object
) -> dict[str, object]:
    """Builds the body of an error; `beside` are the keys next to `error`."""
    return {"error": {"code": code, "message": message, "hint": hint}, **beside}


class Refusal(BaseModel):
    """The inside of an error body."""

    code: str
    message: str
    hint: str | None = None


def parse_error(data: bytes) -> tuple[Refusal, JsonObject] | None:
    """Reads (error, keys beside it), or None when these bytes are not an error of ours."""
    try:
        document = json.loads(data)
        return Refusal.model_validate(document.pop("error")), document
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
