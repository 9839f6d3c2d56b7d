"""Raw TLS over loopback: what any encrypted transfer on this machine is measured against.

Python's own `ssl` at both ends, two processes, megabyte writes, nothing else. The two ends
agree on a key without certificates, so that there is none to make or to keep; the cipher is
the one that TLS 1.3 takes first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco_cli.bench.support.children import child

CIPHER = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"
PIECE = 1 << 20

# The group ffdhe2048 of RFC 7919.
GROUP = """\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


@contextlib.contextmanager
def raw_tls() -> Iterator[Callable[[int], float]]:
    """Gives a function that sends so many bytes and says how many a second arrived."""
    ours, theirs = multiprocessing.Pipe()
    with child(_receive, theirs):
        plain = socket.create_connection(("127.0.0.1", ours.recv()), 30)
        with _context(server=False).wrap_socket(plain) as line:
            piece = bytes(PIECE)

            def send(size: int) -> float:
                count = -(-size // PIECE)
                ours.send(count * PIECE)
                began = time.monotonic()
                for _ in range(count):
                    line.sendall(piece)
                line.recv(1)
                return count * PIECE / (time.monotonic() - began)

            yield send


def _receive(pipe: Any) -> None:
    buffer = bytearray(PIECE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        plain, _ = listener.accept()
    with _context(server=True).wrap_socket(plain, server_side=True) as line:
        while True:
            try:
                left = pipe.recv()
            except EOFError:  # Nobody is left who measures.
                return
            while left > 0:
                left -= line.recv_into(buffer)
            line.sendall(b".")


def _context(*, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.maximum_version = ssl.TLSVersion.TLSv1_2  # The last that works without certificates.
    made.set_ciphers(CIPHER)
    if server:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(GROUP)
            file.flush()
            made.load_dh_params(file.name)
    return made
