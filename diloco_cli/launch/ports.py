"""Which ports of this machine are free?"""

from __future__ import annotations

import contextlib
import socket


def free_addresses(count: int) -> list[str]:
    """So many addresses of this machine alone at which nobody listens, each another one."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in found]
