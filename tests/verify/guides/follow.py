"""Gives every command of the guides for several hosts on the host it is meant for.

    python -m tests.verify.guides.follow [--keep]

Each command is looked up in its guide, so a guide that says something else fails. One small run
goes through SSH, TLS, joining and leaving, a backup, a lost server and one that was set back, on
five hosts that are network namespaces. Needs root, sshd, rsync and curl; some minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests import ROOT
from tests.verify.guides.hosts import Host, Hosts, NotHere, Started, wait_for

NAMES = ["server", "paris", "tokyo", "oslo", "spare", "desk"]
SMALLER = """
model: {kind: decoder, layers: 1, width: 32, heads: 2}
inner: {batch: 2, sequence: 32}
server: {listen: 127.0.0.1:7350, store: {kind: folder}, lease: 5, health: 127.0.0.1:7351}
budget: {tokens: 100_000_000}
"""


class Guide:
    """A page; says each command before it is given, and refuses one that it does not have."""

    def __init__(self, name: str) -> None:
        self.name = name
        text = (ROOT / "docs" / "guides" / name).read_text()
        self._text = re.sub(r"\s+", " ", text)

    def says(self, command: str) -> bool:
        return command in self._text

    def __call__(self, command: str, **names: str) -> str:
        """The command, with placeholders of the guide replaced by what stands here for them."""
        if not self.says(command):
            raise AssertionError(f"{self.name} does not say: {command}")
        for placeholder, name in names.items():
            command = command.replace(placeholder, name)
        print(f"{self.name}: {command}", flush=True)
        return command


def said_once(line: str) -> None:
    print(f"    {line}", flush=True)


class Story:
    """The hosts, and what is running on them."""

    def __init__(self, hosts: dict[str, Host], network: Hosts) -> None:
        self.network = network
        self.server, self.paris, self.tokyo, self.oslo, self.spare, self.desk = (
            hosts[f"{name}.example"] for name in NAMES
        )
        self.running: list[Started] = []
        self.workers: dict[str, Started] = {}

    def start(self, host: Host, command: str, place: str = ".") -> Started:
        started = host.start(command, place, log=f"terminal-{len(self.running)}.log")
        self.running.append(started)
        return started

    def status(self, host: Host, place: str, target: str = "runs/my-run") -> dict:
        said = host.run(f"diloco status {target} --format json 2>/dev/null || true", place)
        return json.loads(said) if said.startswith("{") else {}

    def contributing(self, host: Host, place: str, *names: str) -> None:
        def all_do() -> bool:
            for each in self.running:
                each.process.poll()
            regions = self.status(host, place).get("regions", [])
            # While no server answers, the document is the last known state, which has names only.
            known = [region for region in regions if isinstance(region, dict)]
            good = {region["name"] for region in known if region.get("contributing")}
            return set(names) <= good

        began = time.monotonic()
        wait_for(all_do, f"{', '.join(names)} contributing")
        said_once(f"{', '.join(names)} contribute after {time.monotonic() - began:.0f} s")

    def end(self) -> None:
        for started in reversed(self.running):
            started.kill()


def smaller(host: Host) -> None:
    """The one step that a guide leaves to its reader: edit run.yaml."""
    file = host.home / "my-run" / "run.yaml"
    kept, left_out = [], False
    keys = re.findall(r"^(\w+):", SMALLER, re.M)
    for line in file.read_text().splitlines():
        if re.match(r"\w", line):
            left_out = line.split(":")[0] in keys
        if not left_out:
            kept.append(line)
    file.write_text("\n".join(kept) + SMALLER)
    host.run("diloco validate run.yaml", "my-run")


def over_ssh(story: Story) -> None:
    guide = Guide("several-hosts.md")
    server, paris = story.server, story.paris
    server.run(guide("diloco init my-run --regions paris,tokyo,iowa"))
    smaller(server)
    # "A region's host gets run.yaml and its own script"
    server.run("scp my-run/run.yaml my-run/start-paris.sh paris.example:")
    serving = story.start(server, guide("./start-server.sh"), "my-run")
    wait_for(lambda: "http://127.0.0.1:7350" in serving.said(), "the server's URL")
    tunnel = guide("ssh -N -L 7350:127.0.0.1:7350 server.example &").rstrip(" &")
    line = story.start(paris, tunnel)
    working = story.start(paris, guide("./start-paris.sh http://127.0.0.1:7350"))
    story.contributing(server, "my-run", "paris")
    assert "paris" in paris.run("diloco status http://127.0.0.1:7350")
    server.run("diloco stop runs/my-run", "my-run")
    assert serving.wait() == 0 and working.wait() == 0, working.said()
    line.kill()
    for host in (server, paris):
        host.run("rm -rf my-run runs run.yaml start-paris.sh")


def over_tls(story: Story) -> Started:
    guide = Guide("tls.md")
    server, url = story.server, "https://server.example:7350"
    server.run(guide("diloco init my-run --regions paris,tokyo && cd my-run"))
    smaller(server)
    server.run(guide("diloco certs init --host server.example"), "my-run")
    for name, host in (("paris", story.paris), ("tokyo", story.tokyo)):
        for command in (
            "diloco certs issue --region paris --bundle paris.tar",
            "scp paris.tar paris.example: && rm paris.tar",
        ):
            server.run(guide(command).replace("paris", name), "my-run")
        host.run(guide("tar -xf paris.tar && rm paris.tar").replace("paris", name))
        leaked = host.run("find . -name ca.key -o -name tokens.json -o -path '*admins*'")
        assert not leaked, leaked
    serving = story.start(server, guide("./start-server.sh"), "my-run")
    command = guide("my-run/start-paris.sh https://server.example:7350")
    for name, host in (("paris", story.paris), ("tokyo", story.tokyo)):
        story.workers[name] = story.start(host, command.replace("paris", name))
    wait_for(lambda: "serving at" in serving.said(), "the server's URL")
    story.contributing(server, "my-run", "paris", "tokyo")
    guide("diloco status runs/my-run")
    # Looking from elsewhere
    server.run(guide("diloco certs issue --reader me"), "my-run")
    server.run("ssh desk.example mkdir -p certs/readers", "my-run")
    server.run("scp -r certs/readers/me desk.example:certs/readers/me", "my-run")
    look = guide("diloco status https://server.example:7350 --certs certs/readers/me")
    assert "contributing" in story.desk.run(look)
    assert "--certs names" in story.desk.run(f"diloco status {url}", code=4)
    scrape = (
        "curl -sSf --cert client.pem --key client.key --cacert ca.pem "
        f'-H "Authorization: Bearer $(cat token)" {url}/metrics'
    )
    assert "diloco_tokens" in story.desk.run(scrape, "certs/readers/me")
    assert '"ok": true' in server.run("curl -sSf http://127.0.0.1:7351/healthz")
    # Renewing: with a worker that goes on
    server.run(guide("diloco certs issue --region paris --renew"), "my-run")
    guide("copy `certs/regions/paris` over the one on its host within a day")
    server.run("scp -r certs/regions/paris/. paris.example:my-run/certs/regions/paris/", "my-run")
    worker = story.workers["paris"]
    wait_for(lambda: "credential" in worker.said(), "a worker that takes up its new credential")
    server.run(guide("diloco certs init --host other.example"), "my-run")
    story.contributing(server, "my-run", "paris", "tokyo")
    return serving


def joining(story: Story) -> None:
    guide = Guide("several-hosts.md")
    server = story.server
    server.run(guide("diloco certs issue --region oslo --bundle oslo.tar"), "my-run")
    server.run("scp oslo.tar oslo.example: && rm oslo.tar", "my-run")
    command = guide("tar -xf oslo.tar && my-run/start-oslo.sh https://server.example:7350")
    unpack, start = command.split(" && ")
    story.oslo.run(unpack)
    oslo = story.start(story.oslo, start)
    story.contributing(server, "my-run", "oslo")
    assert oslo.stop() == 0, oslo.said()
    leave = guide("diloco work run.yaml --region oslo --server … --leave")
    leave = leave.replace("…", "https://server.example:7350 --certs certs/regions/oslo")
    said = story.oslo.run(leave, "my-run")
    said_once(said.strip().splitlines()[-1])
    server.run("diloco status runs/my-run | grep -q 'oslo.*retired'", "my-run")


def taken_out(story: Story) -> None:
    """Of tls.md: take a region out; and what its next start says."""
    guide, spare = Guide("tls.md"), story.spare
    remove = guide("diloco amend RUN --remove-region paris", RUN="runs/my-run")
    spare.run(remove.replace("paris", "tokyo"), "my-run")
    assert story.workers["tokyo"].wait() == 2, story.workers["tokyo"].said()
    revoke = guide("diloco certs revoke --region paris")
    spare.run(revoke.replace("paris", "tokyo"), "my-run")
    said = story.tokyo.run("my-run/start-tokyo.sh https://server.example:7350", code=2)
    said_once(said.strip().splitlines()[-2])
    assert story.workers["paris"].process.poll() is None


def backed_up(story: Story, serving: Started) -> Started:
    guide = Guide("backup.md")
    server, spare = story.server, story.spare
    names = {"/backups": str(server.home / "backups"), "NAME": "my-run"}
    server.run(guide("diloco backup runs/NAME --to /backups/NAME", **names), "my-run")
    server.run(guide("diloco replay /backups/NAME/newest", **names), "my-run")
    # Another host takes over, with what was merged up to a copy of the stopped server.
    assert serving.stop() == 0, serving.said()
    server.run(guide("diloco backup runs/NAME --to /backups/NAME", **names), "my-run")
    server.run("rsync -aH backups spare.example:")
    names["/backups"] = str(spare.home / "backups")
    spare.run("mkdir my-run")
    said_once(
        spare.run(guide("diloco restore /backups/NAME --dir runs/NAME", **names), "my-run").strip()
    )
    again = guide("diloco serve runs/NAME/spec.resolved.yaml --dir runs/NAME", **names)
    serving = story.start(spare, again, "my-run")
    moved = {f"{name}.example": f"{name}.example" for name in NAMES}
    story.network.rename({**moved, "server.example": "spare.example"})
    story.contributing(spare, "my-run", "paris", "tokyo")
    return serving


def lost(story: Story, serving: Started) -> Started:
    guide = Guide("lost-server.md")
    spare = story.spare
    serving.process.send_signal(signal.SIGKILL)
    serving.wait()
    spare.run("mv my-run/certs certs && rm -rf my-run/runs")  # The disk is gone.
    for name in ("paris", "tokyo"):
        bring = guide(
            "rsync -a --exclude 'checkpoint*' paris:runs/NAME/ found/paris/", NAME="my-run"
        )
        bring = bring.replace("paris:", "paris.example:my-run/").replace("paris", name)
        spare.run(f"mkdir -p found && {bring}")
    restore = guide(
        "diloco restore --from-regions found/paris found/tokyo --dir runs/NAME", NAME="my-run"
    )
    spare.run("rm -rf my-run && mkdir my-run && mv found my-run/")
    told = spare.run(restore + " --yes", "my-run")
    print(told)
    spare.run("mv certs my-run/certs")  # They are in no region's folder, as the guide says.
    start = guide(
        "diloco serve runs/NAME/spec.resolved.yaml --dir runs/NAME --set server.certs=certs "
        "--set server.listen=0.0.0.0:7350",
        NAME="my-run",
    )
    serving = story.start(spare, start, "my-run")
    story.contributing(spare, "my-run", "paris", "tokyo")
    spare.run(
        guide("diloco amend runs/NAME --set server.admit=credentialed", NAME="my-run"), "my-run"
    )
    return serving


def set_back(story: Story, serving: Started) -> None:
    guide = Guide("lost-server.md")
    spare, names = story.spare, {"NAME": "my-run"}
    spare.run("diloco backup runs/my-run --to older", "my-run")
    reached = story.status(spare, "my-run")["outer_steps"]
    wait_for(lambda: story.status(spare, "my-run")["outer_steps"] > reached + 8, "more rounds")
    serving.process.send_signal(signal.SIGKILL)
    serving.wait()
    spare.run("mv runs/my-run/server lost", "my-run")
    spare.run("diloco restore older --dir runs/my-run", "my-run")
    start = guide("diloco serve runs/NAME/spec.resolved.yaml --dir runs/NAME", **names)
    start += " --set server.certs=certs --set server.listen=0.0.0.0:7350"  # As in the step before.
    serving = story.start(spare, start, "my-run")
    for worker in story.workers.values():
        assert worker.wait() == 5, worker.said()
        assert "restored from an older copy" in worker.said()
    spare.run(guide("diloco stop runs/NAME", **names), "my-run")
    serving.wait()
    spare.run(guide("diloco restore runs/NAME --dir runs/NAME --set-back", **names), "my-run")
    story.start(spare, start, "my-run")
    for name, host in (("paris", story.paris), ("tokyo", story.tokyo)):
        command = f"my-run/start-{name}.sh https://server.example:7350"
        story.workers[name] = story.start(host, command)
    story.contributing(spare, "my-run", "paris", "tokyo")


def follow(folder: Path) -> None:
    network = Hosts(folder, [f"{name}.example" for name in NAMES])
    with network as hosts, ExitStack() as ends:
        story = Story(hosts, network)
        ends.callback(story.end)
        over_ssh(story)
        serving = over_tls(story)
        joining(story)
        serving = backed_up(story, serving)
        serving = lost(story, serving)
        set_back(story, serving)
        taken_out(story)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the hosts' folders behind")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="diloco-guides-"))
    try:
        follow(folder / "hosts")
    except NotHere as why:
        print(f"not here: {why}")
        return 1
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("every step worked as written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
