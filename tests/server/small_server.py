"""A server of the small run, as a process: python -m tests.server.small_server FOLDER [CHANGES]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError
from diloco_cli.server.http import idle
from diloco_cli.server.lifecycle import serve
from diloco_cli.system import failpoints, logs
from tests.server.harness import initial, make_settings, make_spec


def main() -> int:
    return run(Path(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))


def run(folder: Path, changes: dict[str, Any]) -> int:
    logs.set_up("server")
    with_parent = changes.pop("with_parent", False)
    failpoints.arm(changes.pop("failpoint", ""))
    if changes.pop("bad_disk", False):
        _spoil_the_disk()
    idle.STRANGER_SECONDS = changes.pop("stranger_seconds", idle.STRANGER_SECONDS)
    try:
        return serve(make_settings(make_spec(**changes)), folder, initial, with_parent=with_parent)
    except DilocoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _spoil_the_disk() -> None:
    """Lets every flush of a file's data fail, as a dying disk does."""

    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    os.fdatasync = fail


if __name__ == "__main__":
    sys.exit(main())
