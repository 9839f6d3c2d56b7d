"""A server of the small run, as a process: python small_server.py FOLDER [CHANGES]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rig import initial, make_recipe, make_spec

from diloco_cli import failpoints
from diloco_cli.errors import DilocoError
from diloco_cli.server import sweep
from diloco_cli.server.serve import serve


def main() -> int:
    return run(Path(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))


def run(folder: Path, changes: dict[str, Any]) -> int:
    with_parent = changes.pop("with_parent", False)
    failpoints.arm(changes.pop("failpoint", ""))
    if changes.pop("bad_disk", False):
        _spoil_the_disk()
    sweep.STRANGER_SECONDS = changes.pop("stranger_seconds", sweep.STRANGER_SECONDS)
    try:
        return serve(make_recipe(make_spec(**changes)), folder, initial, with_parent=with_parent)
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
