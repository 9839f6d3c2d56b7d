"""What every store must do, whatever it is made of; a new kind is tested once it is registered."""

from pathlib import Path

import numpy as np
import pytest

from diloco_cli.core.journal_records import Entry
from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.server.store import blob_names, stores
from diloco_cli.server.store.archive import Archive, PayloadLost
from diloco_cli.server.store.run_store import RunStore, open_store
from diloco_cli.server.store.state_format import StoredState

DIGEST, OTHER = "a" * 64, "b" * 64


def opened(kind: str, folder: Path, **wanted: str) -> tuple[RunStore, list[Entry]]:
    asked = {"layout": "lay", "spec": "spec"} | wanted
    options = {"history": 2} if kind == "folder" else {}
    return open_store(
        {"kind": kind, **options}, folder / "server", layout=asked["layout"], spec=asked["spec"]
    )


@pytest.fixture(params=stores.kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(kind: str, tmp_path: Path):
    store, records = opened(kind, tmp_path)
    assert records == []
    yield store
    store.close()


def state(seed: int) -> StoredState:
    rng = np.random.default_rng(seed)
    return StoredState(*(rng.normal(size=100).astype(np.float32) for _ in range(3)))


def test_a_restart_finds_the_same_run_and_every_record(kind, tmp_path):
    first, _ = opened(kind, tmp_path)
    first.journal.append({"kind": "called", "fragment": 0})
    run = first.run
    first.close()
    second, records = opened(kind, tmp_path)
    assert (second.run, records) == (run, [{"kind": "called", "fragment": 0}])
    second.close()


def test_reading_a_store_gives_what_is_in_it(kind, tmp_path):
    store, _ = opened(kind, tmp_path)
    store.journal.append({"kind": "called", "fragment": 0})
    store.publish(0, 1, state(1), b"frame")
    store.close()
    blobs, journal = stores.build({"kind": kind}).read(
        tmp_path / "server", layout="lay", spec="spec"
    )
    assert (journal.run, journal.records) == (store.run, [{"kind": "called", "fragment": 0}])
    assert Archive(blobs, journal.run).load_state(0, 1).digest == state(1).digest
    with pytest.raises(SpecError, match="holds another run"):
        stores.build({"kind": kind}).read(tmp_path / "server", layout="lay", spec="other")


def test_blobs_are_listed_read_moved_and_dropped_by_name(store):
    blobs = store.blobs
    blobs.put({"fragments/0/b": (b"12", memoryview(b"345")), "fragments/0/a": (b"",)})
    blobs.put({"fragments/1/b": (b"other",)}, durable=False)
    assert blobs.names("fragments/0/") == ["fragments/0/a", "fragments/0/b"]
    assert blobs.names("fragments/0/b") == ["fragments/0/b"] and blobs.names("fragments/9/") == []
    assert blobs.size("fragments/0/b") == 5 and blobs.size("fragments/0/a") == 0
    assert blobs.view("fragments/0/b") == b"12345" and blobs.view("fragments/0/a") == b""
    reader = blobs.open("fragments/0/b")
    blobs.move("fragments/0/b", "fragments/1/a")
    blobs.move("fragments/0/b", "fragments/1/a")
    blobs.drop(["fragments/1/a", "fragments/1/a"])
    assert reader.read(1, 3) == b"234" and reader.read_now(1, 3) in (b"234", None)
    reader.close()
    assert blobs.names("fragments/1/") == ["fragments/1/b"] and "a" in blobs.locate("a")
    assert blobs.size("fragments/1/a") is None
    for read in (blobs.view, blobs.open):
        with pytest.raises(FileNotFoundError):
            read("fragments/1/a")


def test_two_runs_never_have_the_same_id(kind, tmp_path):
    left, _ = opened(kind, tmp_path / "left")
    right, _ = opened(kind, tmp_path / "right")
    assert left.run != right.run
    left.close()
    right.close()


def test_a_second_server_is_refused_until_the_first_has_gone(kind, tmp_path):
    first, _ = opened(kind, tmp_path)
    with pytest.raises(StoreError, match="in use by another server"):
        opened(kind, tmp_path)
    first.close()
    opened(kind, tmp_path)[0].close()


@pytest.mark.parametrize("other", [{"spec": "other"}, {"layout": "other"}])
def test_another_run_is_refused_and_the_folder_is_free_again(kind, tmp_path, other):
    opened(kind, tmp_path)[0].close()
    with pytest.raises(SpecError, match="holds another run"):
        opened(kind, tmp_path, **other)
    opened(kind, tmp_path)[0].close()


def test_a_payload_is_kept_under_its_digest_however_often(store):
    store.keep_payload(DIGEST, b"codes")
    store.keep_payload(DIGEST, b"codes")
    assert store.payload(DIGEST) == b"codes"
    assert store.payloads() == {DIGEST}


def test_a_payload_can_be_written_before_its_digest_is_known(store):
    draft = store.draft_payload(10)
    draft.write(b"co")
    draft.write(memoryview(b"des"))
    assert draft.read() == b"codes" and store.payloads() == set()
    store.keep_payload(DIGEST, draft)
    assert store.payload(DIGEST) == b"codes"


def test_a_discarded_draft_leaves_nothing(store):
    draft = store.draft_payload()
    draft.write(b"codes")
    draft.discard()
    draft.discard()
    assert store.payloads() == set()


def test_a_dropped_payload_is_gone_and_dropping_it_again_is_no_error(store):
    store.keep_payload(DIGEST, b"codes")
    store.keep_payload(OTHER, b"more")
    store.drop_payloads([DIGEST])
    store.drop_payloads([DIGEST])
    assert store.payloads() == {OTHER}
    with pytest.raises(PayloadLost, match=DIGEST):
        store.payload(DIGEST)


@pytest.mark.parametrize("digest", ["", "abc", "../" + "a" * 61, "A" * 64, "a" * 64 + "\n"])
def test_what_is_no_digest_is_never_used_as_a_name(store, digest):
    with pytest.raises(ValueError, match="not a SHA-256"):
        store.keep_payload(digest, b"codes")


def test_a_version_comes_back_bit_for_bit(store):
    digest = store.publish(3, 41, state(1), b"frame")
    loaded = store.load_state(3, 41)
    assert loaded.digest == digest == state(1).digest
    for name in ("theta", "momentum", "published"):
        assert getattr(loaded, name).tobytes() == getattr(state(1), name).tobytes()
    assert store.blobs.view(blob_names.delta(3, 41)) == b"frame"


def test_a_state_may_have_no_momentum_and_share_its_weights_with_what_is_published(store):
    weights = np.arange(4, dtype=np.float32)
    store.publish(0, 0, StoredState(weights, np.zeros(0, np.float32), weights), None)
    loaded = store.load_state(0, 0)
    assert loaded.momentum.size == 0 and loaded.published.tolist() == [0, 1, 2, 3]
    assert store.blobs.size(blob_names.delta(0, 0)) is None


def test_publishing_again_after_a_crash_replaces_the_version(store):
    store.publish(0, 1, state(1), b"old")
    store.publish(0, 1, state(2), b"new")
    assert store.load_state(0, 1).digest == state(2).digest


def test_only_the_newest_versions_are_kept(store):
    for version in range(5):
        store.publish(0, version, state(version), b"frame")
    store.publish(1, 0, state(0), None)
    store.prune(0, 3, 3)
    assert store.versions(0) == [2, 3, 4], "two up to version 3; 4 is not journaled yet"
    assert store.blobs.size(blob_names.delta(0, 1)) is None
    assert store.blobs.size(blob_names.delta(0, 2))
    assert store.versions(1) == [0]


def test_a_version_that_is_missing_is_said_with_its_numbers(store):
    with pytest.raises(StoreError, match="Fragment 2 is published at version 9"):
        store.load_state(2, 9)


def test_the_digest_tells_apart_states_that_differ_in_one_bit():
    one, other = state(1), state(1)
    other.momentum[7] = np.nextafter(other.momentum[7], np.float32(9))
    assert one.digest != other.digest


def test_every_refusal_says_what_to_do(kind, tmp_path, store):
    for attempt in (
        lambda: opened(kind, tmp_path),
        lambda: store.payload(DIGEST),
        lambda: store.load_state(0, 1),
    ):
        with pytest.raises(DilocoError) as refusal:
            attempt()
        assert refusal.value.hint
