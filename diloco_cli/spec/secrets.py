"""Does a spec hold something that must not be written down?

A spec is copied to every region, written into the run folder and shown in reports, so
a credential in it is a credential given away. Its *name* may be there: `token_file`,
`token_env`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from diloco_cli.spec.rules import Path, SpecFault
from diloco_cli.spec.yaml_source import Document

_SECRET = re.compile(
    r"((auth|access|api|bearer|refresh|hf)[-_]?)?token"
    r"|(.*[-_])?(password|passwd|passphrase|secret|credentials?|(api|access|private|secret)[-_]?key)"
)


def is_secret(key: object) -> bool:
    return isinstance(key, str) and _SECRET.fullmatch(key.lower()) is not None


def inline_secrets(document: Document) -> Iterator[SpecFault]:
    """Finds keys that hold a secret, without repeating their values."""
    for path in _secret_paths(document.data, ()):
        yield SpecFault(
            path,
            "is a secret inside the spec, which is copied, logged and shared",
            "Remove it and change the secret: it has been in a file. Name where it is instead, "
            "with token_file or token_env of a region.",
            on_key=True,
        )


def _secret_paths(data: Any, path: Path) -> Iterator[Path]:
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in inner:
        if is_secret(key) and value is not None and not isinstance(value, dict):
            yield (*path, key)
        elif isinstance(value, (dict, list)):
            yield from _secret_paths(value, (*path, key))
