"""Starts servers quickly: everything is loaded once, and every server is a fork of that.

One JSON line in: {"folder", "changes"}. One line out when the server is started, with its
process id, and one when it has ended, with its exit code. What is killed is a process of its
own with a disk like any other; only the second of loading Python's modules is spared.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from diloco_cli.wire.kernels.jit import warm
from tests.server import small_server


def main() -> None:
    warm()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become_a_server(asked)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become_a_server(asked: dict) -> None:
    code = 1
    try:
        log = os.open(Path(asked["folder"]) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 2)
        os.dup2(log, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = small_server.run(Path(asked["folder"]), asked["changes"])
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
