"""Hosts on one machine: each has its network, names, home folder and SSH server; needs root.

Every host is a network and a mount namespace. A bridge in a namespace of its own joins them, so
nothing of this machine's network is touched, and all of it is gone with its processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip", "ssh", "scp", "rsync", "/usr/sbin/sshd", "curl")
HOLD = "import sys; sys.stdin.read()"


class NotHere(Exception):
    """Why no hosts can be made on this machine."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NotHere(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def _hold(*kinds: str) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen(
        ["unshare", *kinds, sys.executable, "-c", HOLD], stdin=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and holder.poll() is None:
        with suppress(OSError):
            if os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                return holder
        time.sleep(0.01)
    raise NotHere("a network namespace cannot be made here (it needs root)")


def wait_for(true: Callable[[], bool], what: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not seen in {seconds:.0f} s: {what}")
        time.sleep(0.2)


class Host:
    """One of them; commands are those of a shell in its home folder."""

    def __init__(self, name: str, home: Path, holder: int, path: str) -> None:
        self.name, self.home, self._holder, self._path = name, home, holder, path

    def _argv(self, command: str, place: str) -> list[str]:
        inside = ["nsenter", "-t", str(self._holder), "--mount", "--net"]
        return [*inside, "bash", "-c", f"cd {self.home / place} && {command}"]

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        return {**kept, "HOME": str(self.home), "PATH": self._path, "LC_ALL": "C.UTF-8"}

    def run(self, command: str, place: str = ".", *, code: int = 0, seconds: float = 600) -> str:
        """Gives what it said; raises unless it ends with the code that is expected."""
        done = subprocess.run(
            self._argv(command, place),
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=seconds,
        )
        if done.returncode != code:
            raise AssertionError(
                f"{self.name}$ {command}: exit code {done.returncode}, not {code}\n{done.stdout}"
            )
        return done.stdout

    def start(self, command: str, place: str = ".", *, log: str) -> Started:
        """Starts something that stays, as a person would in a terminal of its own."""
        output = self.home / log
        with output.open("ab") as file:
            process = subprocess.Popen(
                self._argv(f"exec {command}", place),
                env=self._environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return Started(process, output)


class Started:
    """A process of a host, with what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait(self, seconds: float = 300) -> int:
        return self.process.wait(seconds)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 300) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(seconds)

    def kill(self) -> None:
        """Ends it and all that it started, without asking."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Hosts:
    """Hosts that reach each other by name."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
            raise NotHere(f"there is no {lacking[0]} here")
        self._folder, self._ends = folder, ExitStack()
        self._addresses = {name: f"10.77.7.{10 + at}" for at, name in enumerate(names)}
        self.hosts: dict[str, Host] = {}
        try:
            self._make(names)
        except BaseException:
            self._ends.close()
            raise

    def _make(self, names: list[str]) -> None:
        self._folder.mkdir(parents=True)
        key = self._folder / "key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        self.rename({name: name for name in names})
        middle = self._holder("--net")
        inside = ("nsenter", "-t", str(middle), "--net", "ip")
        _run(*inside, "link", "add", "hub", "type", "bridge")
        _run(*inside, "link", "set", "hub", "up")
        for at, name in enumerate(names):
            holder = self._holder("--net", "--mount")
            _run(*inside, "link", "add", f"h{at}", "type", "veth", "peer", "name", "wan")
            _run(*inside, "link", "set", "wan", "netns", str(holder))
            _run(*inside, "link", "set", f"h{at}", "master", "hub")
            _run(*inside, "link", "set", f"h{at}", "up")
            host = self._host(name, holder)
            host.run(f"ip link set lo up; ip addr add {self._addresses[name]}/24 dev wan")
            host.run("ip link set wan up")
            for file in ("passwd", "hosts"):
                place = host.home if file == "passwd" else self._folder
                host.run(f"mount --bind {place / file} /etc/{file}")
            self._start_ssh(host)
            self.hosts[name] = host

    def _holder(self, *kinds: str) -> int:
        holder = _hold(*kinds)
        self._ends.callback(holder.wait)
        self._ends.callback(holder.kill)
        return holder.pid

    def _host(self, name: str, holder: int) -> Host:
        home = self._folder / name
        (home / ".ssh").mkdir(parents=True)
        shutil.copy(self._folder / "key", home / ".ssh" / "id_ed25519")
        shutil.copy(self._folder / "key.pub", home / ".ssh" / "authorized_keys")
        options = "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        (home / ".ssh" / "config").write_text(options)
        lines = Path("/etc/passwd").read_text().splitlines()
        fields = [line.split(":") for line in lines]
        for each in fields:
            each[5] = str(home) if each[0] == "root" else each[5]
        (home / "passwd").write_text("\n".join(":".join(each) for each in fields) + "\n")
        bin_folder = Path(sys.executable).parent
        return Host(name, home, holder, f"{bin_folder}:{os.environ['PATH']}")

    def _start_ssh(self, host: Host) -> None:
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.home / "host_key"))
        settings = {
            "HostKey": host.home / "host_key",
            "AuthorizedKeysFile": host.home / ".ssh" / "authorized_keys",
            "PidFile": host.home / "sshd.pid",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
            "Subsystem": "sftp internal-sftp",
        }
        text = "".join(f"{key} {value}\n" for key, value in settings.items())
        (host.home / "sshd_config").write_text(text)
        os.makedirs("/run/sshd", exist_ok=True)
        command = f"/usr/sbin/sshd -D -e -f {host.home / 'sshd_config'}"
        server = host.start(command, log="sshd.log")
        self._ends.callback(server.kill)
        wait_for(lambda: "listening" in server.said(), f"SSH of {host.name}")

    def rename(self, names: dict[str, str]) -> None:
        """Says which host answers to a name, on all of them: as moving it in the DNS would."""
        lines = [f"{self._addresses[host]} {name}" for name, host in names.items()]
        # Written in place: what is mounted is this file and not its name.
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def close(self) -> None:
        self._ends.close()

    def __enter__(self) -> dict[str, Host]:
        return self.hosts

    def __exit__(self, *_: object) -> None:
        self.close()
