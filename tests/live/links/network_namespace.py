"""A second network namespace behind a veth that the kernel shapes with tbf; needs root.

    root namespace                       the other one
    server ◀─ forwarder ◀── veth, tbf ── forwarder ◀─ client

Servers and clients speak plain HTTP over loopback only, so a forwarder is at either end.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests import ROOT

TOOLS = ("unshare", "nsenter", "ip", "tc")


class NotHere(Exception):
    """Why this machine shapes nothing."""


@contextmanager
def forward(host: str, target: tuple[str, int]) -> Iterator[int]:
    """Gives a free port of `host` from which all is carried to the target, and back."""
    with socket.create_server((host, 0)) as listener:
        carriers: list[threading.Thread] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    here, _ = listener.accept()
                    carriers.append(threading.Thread(target=_carry, args=(here, target)))
                    carriers[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *carriers):
                thread.join(10)


def _carry(here: socket.socket, target: tuple[str, int]) -> None:
    with here, socket.create_connection(target) as there:
        back = threading.Thread(target=_copy, args=(there, here))
        back.start()
        _copy(here, there)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class Shaped:
    def __init__(self, holder: int, device: str, address: str) -> None:
        self.holder, self.device, self.address = holder, device, address

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the other namespace."""
        return _run("nsenter", "-t", str(self.holder), "-n", *command)

    def counted(self) -> tuple[int, int]:
        """Bytes that tbf let through, and how often it made one wait."""
        said = self.inside("tc", "-s", "qdisc", "show", "dev", self.device).stdout
        found = re.search(r"Sent (\d+) bytes .*overlimits (\d+)", said)
        assert found, said
        return int(found[1]), int(found[2])


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    if done.returncode:
        raise NotHere(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done


@contextmanager
def shaped(rate: str) -> Iterator[Shaped]:
    """A namespace whose way to this one has so many bits a second; raises NotHere."""
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise NotHere(f"there is no {lacking[0]} here")
    mark = os.getpid() % 0xFFFF
    ours, theirs = f"dil{mark:x}a", f"dil{mark:x}b"
    net = f"10.{200 + mark % 50}.{mark >> 8 & 255}"
    holder = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    )
    made = Shaped(holder.pid, theirs, f"{net}.1")
    try:
        _wait_until_apart(holder)
        _run("ip", "link", "add", "name", ours, "type", "veth", "peer", "name", theirs)
        _run("ip", "link", "set", theirs, "netns", str(holder.pid))
        _run("ip", "addr", "add", f"{net}.1/30", "dev", ours)
        _run("ip", "link", "set", ours, "up")
        made.inside("ip", "link", "set", "lo", "up")
        made.inside("ip", "addr", "add", f"{net}.2/30", "dev", theirs)
        made.inside("ip", "link", "set", theirs, "up")
        shape = ("rate", rate, "burst", "32kb", "latency", "100ms")
        made.inside("tc", "qdisc", "add", "dev", theirs, "root", "tbf", *shape)
        yield made
    finally:
        with suppress(NotHere):
            _run("ip", "link", "del", ours)
        holder.kill()
        holder.communicate()


def _wait_until_apart(holder: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and holder.poll() is None:
        with suppress(OSError):
            if os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                return
        time.sleep(0.01)
    raise NotHere("a network namespace cannot be made here (it needs root)")


if __name__ == "__main__":
    # In the other namespace: python shaped.py HOST PORT CLOCK EPOCH FILE sends a frame.
    from pathlib import Path

    from diloco_cli.net.client import Client
    from diloco_cli.net.options import Options

    host, port, clock, epoch, file = sys.argv[1:]
    with (
        forward("127.0.0.1", (host, int(port))) as near,
        Client(f"http://127.0.0.1:{near}", Options(part_bytes=700_000)) as client,
    ):
        client.run()
        sent = client.submit(0, "here", 0, int(clock), Path(file), epoch=int(epoch))
        print(sent.fate)
