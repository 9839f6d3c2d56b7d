"""SIGKILL at any moment: what was acknowledged is there, and nothing is there by half."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.server.store import blob_names
from diloco_cli.server.store.journal import FileJournal
from diloco_cli.server.store.run_store import open_store

pytestmark = pytest.mark.live

WRITER = """
import sys
from pathlib import Path
from diloco_cli.server.store.journal import FileJournal

journal, _ = FileJournal.open(Path(sys.argv[1]))

while True:
    notes = [{"kind": "note", "place": place, "text": "x" * 300} for place in range(4)]
    numbers = [journal.append(note) for note in notes]
    journal.sync()
    for place, number in enumerate(numbers):
        sys.stdout.write(f"{number} {place}\\n")
    sys.stdout.flush()
"""


def test_no_acknowledged_record_is_lost_when_the_writer_is_killed(tmp_path):
    path = tmp_path / "journal"
    rng = random.Random(5)
    FileJournal.create(path, run="r").close()
    acknowledged: dict[int, int] = {}
    for _ in range(10):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout
        for _ in range(rng.randrange(1, 120)):
            number, place = writer.stdout.readline().split()
            acknowledged[int(number)] = int(place)
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout.read().splitlines():
            if len(words := line.split()) == 2:
                acknowledged[int(words[0])] = int(words[1])
        writer.stdout.close()
        writer.wait()
    journal, records = FileJournal.open(path)
    journal.close()
    assert len(acknowledged) > 100
    for number, place in acknowledged.items():
        assert records[number - 1]["place"] == place


PUBLISHER = """
import sys
from pathlib import Path
import numpy as np
from diloco_cli.server.store.run_store import open_store
from diloco_cli.server.store.state_format import StoredState

store, _ = open_store({"kind": "folder"}, Path(sys.argv[1]), layout="lay", spec="spec")
version = max(store.versions(0), default=0)
while True:
    version += 1
    theta = np.full(20_000, version, np.float32)
    digest = store.publish(0, version, StoredState(theta, theta, theta), b"frame" * 1000)
    store.prune(0, version, version)
    print(version, digest, flush=True)
"""


def publish_and_kill(folder: Path, answers: int) -> tuple[int, str]:
    """The last version and digest that a publisher spoke of before it was killed."""
    publisher = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert publisher.stdout
    said = [publisher.stdout.readline() for _ in range(answers)]
    publisher.send_signal(signal.SIGKILL)
    said += publisher.stdout.read().splitlines()
    publisher.stdout.close()
    publisher.wait()
    version, digest = said[-1].split()
    return int(version), digest


def test_a_killed_publisher_loses_no_version_and_shows_no_half_of_one(tmp_path):
    rng = random.Random(3)
    for _ in range(6):
        newest, digest = publish_and_kill(tmp_path / "server", rng.randrange(1, 40))
        store, _ = open_store({"kind": "folder"}, tmp_path / "server", layout="lay", spec="spec")
        assert newest in store.versions(0) and store.load_state(0, newest).digest == digest
        for version in store.versions(0):
            assert store.load_state(0, version).theta[-1] == version
            size = store.blobs.size(blob_names.delta(0, version))
            # Of one that is no longer needed, the removal may have been interrupted.
            assert size == 5000 or (size is None and version < newest)
        store.close()
