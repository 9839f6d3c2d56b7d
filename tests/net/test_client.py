"""Each call of the API, over real HTTP/2, against a server that says what the contract says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from diloco_cli.errors import LinkError, SpecError, StoreError, WireError
from diloco_cli.net.client import Client, FencedError, Gone, Held, OlderCopy
from diloco_cli.net.options import ONCE, Options
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Header, pack
from diloco_cli.wire.messages import Heartbeat
from tests.observe.documents import status_json

DIGEST = "b" * 64
LAYOUT = "5" * 64
RUN = {
    "run": "quickstart-1",
    "name": "quickstart",
    "state": "training",
    "spec_digest": DIGEST,
    "layout_digest": LAYOUT,
    "wire": 1,
    "fragments": [60, 50],
    "lease_seconds": 10.0,
    "settings": {"sync": {"every": 24}},
}
NEWS = {
    "n": 17,
    "versions": [4, 3],
    "calls": {"1": 3},
    "fates": {"0": {"digest": DIGEST, "fate": "returned", "why": "too old"}},
    "end": False,
    "finished": False,
    "stop": False,
    "evaluate": True,
    "lease_seconds": 10.0,
}
HEARTBEAT: dict[str, Any] = {
    "epoch": 3,
    "step": 120,
    "training": True,
    "stopping": False,
    "ended": 0,
    "fragments": [{"version": 4, "steps": 10}, {"version": 3, "steps": 0}],
    "tokens": {key: [0, 0] for key in ("trained", "applied", "pending", "refused", "discarded")},
    "loss": float("nan"),
}
PUT = "PUT /v1/fragments/1/contributions/eu/3-500"
JOIN = {"owner": "o-1", "boot": 2, "spec_digest": DIGEST, "layout_digest": LAYOUT}


@pytest.fixture(params=["pyreqwest", "httpx"])
def client(request, puppet, patience) -> Iterator[Client]:
    puppet.will("GET /v1/run", 200, RUN)
    with Client(puppet.url, Options(backend=request.param), stop=patience) as made:
        yield made


def frame(kind: str, version: int, *, fragment: int = 1, size: int = 50, **fields: Any) -> bytes:
    values = np.linspace(-1, 1, size, dtype=np.float32)
    said: dict[str, Any] = {
        "kind": kind,
        "run": "quickstart-1",
        "layout": LAYOUT,
        "fragment": fragment,
        "size": size,
        "codec": {"kind": "fp32"},
        "base": version - (kind == "delta"),
        "version": version,
        "published": vector_digest(values),
        **fields,
    }
    return pack(Header(**said), values)


def test_every_request_says_its_run_and_wire_version(client, puppet):
    assert client.run().fragments == (60, 50)
    puppet.will("GET /v1/status", 200, status_json(state="training"))
    assert client.status().state == "training"
    first, second = puppet.heard()
    assert first["headers"]["diloco-wire"] == second["headers"]["diloco-wire"] == "1"
    assert second["headers"]["diloco-run"] == "quickstart-1"
    assert "diloco-run" not in first["headers"]


def test_a_run_id_given_at_the_start_is_said_from_the_start(puppet, patience):
    puppet.will("GET /v1/run", 200, RUN)
    with Client(puppet.url, run="mine", stop=patience) as client:
        client.run()
    assert puppet.heard()[0]["headers"]["diloco-run"] == "mine"


def test_joining_gives_an_epoch_and_the_news(client, puppet):
    puppet.will("POST /v1/regions/eu/join", 200, {**NEWS, "epoch": 3, "high": 480})
    joined = client.join("eu", **JOIN)
    assert (joined.epoch, joined.high, joined.calls) == (3, 480, {1: 3})
    assert joined.fates[0].fate == "returned"
    sent = json.loads(puppet.heard()[0]["text"])
    assert sent == {**JOIN, "wire": 1, "order": None, "key": None}


@pytest.mark.parametrize(
    "status, code, kind",
    [
        (409, "held", Held),
        (409, "too-soon", Held),
        (409, "older-copy", OlderCopy),
        (409, "other-spec", SpecError),
        (409, "unknown-region", SpecError),
        (403, "other-region", SpecError),
        (401, "no-token", SpecError),
        (412, "fenced", FencedError),
        (422, "bad-body", WireError),
        (404, "no-route", Gone),
        (500, "bug", LinkError),
    ],
)
def test_each_refusal_is_the_exception_one_can_act_on(client, puppet, status, code, kind):
    puppet.refuses("POST /v1/regions/eu/join", status, code, f"It is {code}.", retry_seconds=4.5)
    with pytest.raises(kind, match=f"It is {code}") as refusal:
        client.join("eu", **JOIN)
    assert refusal.value.hint == "Do this."
    if kind is Held:
        assert refusal.value.retry_seconds == 4.5
    assert len(puppet.heard()) == 1


def test_another_wire_version_names_both(client, puppet):
    puppet.refuses("GET /v1/status", 426, "wire", "Wire 1 is too old.", wire=3)
    with pytest.raises(WireError, match="speaks wire version 3, this program wire version 1"):
        client.status()


def test_a_run_of_another_wire_version_names_both(puppet, patience):
    puppet.will("GET /v1/run", 200, {**RUN, "wire": 7})
    with (
        Client(puppet.url, stop=patience) as client,
        pytest.raises(WireError, match="speaks wire version 7, this program wire version 1"),
    ):
        client.run()


def test_somebody_elses_web_page_is_not_taken_for_an_answer(client, puppet):
    puppet.will("GET /v1/status", 404, b"<html>nginx</html>")
    with pytest.raises(LinkError, match="answered 404 in words that are not a diloco server's"):
        client.status()


def test_a_heartbeat_brings_news(client, puppet):
    for report in (HEARTBEAT, Heartbeat.model_validate(HEARTBEAT)):
        puppet.will("POST /v1/regions/eu/heartbeat", 200, NEWS)
        assert client.heartbeat("eu", report).n == 17
    for request in puppet.heard():
        assert json.loads(request["text"])["loss"] is None


def test_a_heartbeat_that_makes_no_sense_is_not_sent(client, puppet):
    with pytest.raises(WireError, match="`step`"):
        client.heartbeat("eu", {**HEARTBEAT, "step": -1})
    assert puppet.heard() == []


def test_waiting_for_calls_ends_with_news_or_with_nothing(client, puppet):
    key = "GET /v1/regions/eu/calls?after=16&epoch=3&wait=20"
    puppet.will(key, 200, NEWS).will(key, 204)
    news = client.calls("eu", after=16, epoch=3)
    assert news and news.versions == (4, 3)
    assert client.calls("eu", after=16, epoch=3) is None


def test_waiting_for_calls_under_an_old_epoch_is_fenced(client, puppet):
    puppet.refuses("GET /v1/regions/eu/calls?after=1&epoch=2&wait=5", 412, "fenced", "Old epoch.")
    with pytest.raises(FencedError, match="Old epoch"):
        client.calls("eu", after=1, epoch=2, wait=5)


def test_the_latest_version_is_described(client, puppet):
    said = {
        "fragment": 1,
        "version": 4,
        "members": ["eu"],
        "merged": {"eu": DIGEST},
        "published": DIGEST,
        "links": {"whole": "/v1/fragments/1/versions/4", "delta": None},
    }
    key = "GET /v1/fragments/1?after=3&wait=20"
    puppet.will(key, 200, said).will(key, 204)
    latest = client.latest(1, after=3)
    assert latest and latest.merged == {"eu": DIGEST}
    assert client.latest(1, after=3) is None


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_contribution_is_put_under_its_name_and_acknowledged(client, puppet, tmp_path, from_disk):
    data = frame("contribution", 3, region="eu", clock=500)
    file = tmp_path / "1.frame"
    file.write_bytes(data)
    puppet.will(PUT, 201, {"fate": "pending"})
    answer = client.submit(1, "eu", 3, 500, file if from_disk else data, epoch=3)
    (request,) = puppet.heard()
    assert (answer.fate, answer.recorded) == ("pending", False)
    assert request["headers"]["diloco-epoch"] == "3"
    assert request["length"] == len(data)


def test_a_retry_hears_the_recorded_answer(client, puppet):
    puppet.will(PUT, 503, b"", {"retry-after": "1"})
    puppet.will(PUT, 200, {"fate": "merged", "why": "", "recorded": True})
    answer = client.submit(1, "eu", 3, 500, b"frame", epoch=3)
    assert (answer.fate, answer.recorded) == ("merged", True)
    assert len(puppet.heard()) == 2


@pytest.mark.parametrize("status, fate", [(409, "returned"), (409, "foreign"), (422, "refused")])
def test_what_the_protocol_decides_is_an_answer_not_an_error(client, puppet, status, fate):
    puppet.refuses(PUT, status, fate, "So it is.", fate=fate, merged=DIGEST, why="for a reason")
    answer = client.submit(1, "eu", 3, 500, b"frame", epoch=3)
    assert (answer.fate, answer.why, answer.merged) == (fate, "for a reason", DIGEST)


@pytest.mark.parametrize(
    "status, code, kind",
    [
        (412, "fenced", FencedError),
        (409, "other-run", SpecError),
        (422, "bad-frame", WireError),
        (413, "too-large", WireError),
    ],
)
def test_what_decides_nothing_is_an_error(client, puppet, status, code, kind):
    puppet.refuses(PUT, status, code, f"It is {code}.")
    with pytest.raises(kind, match=f"It is {code}"):
        client.submit(1, "eu", 3, 500, b"frame", epoch=3)
    assert len(puppet.heard()) == 1


def test_a_fate_that_does_not_exist_is_refused(puppet, patience):
    puppet.will(PUT, 201, {"fate": "eaten"})
    with (
        Client(puppet.url, Options(retry=ONCE), stop=patience) as client,
        pytest.raises(WireError, match="fate"),
    ):
        client.submit(1, "eu", 3, 500, b"frame", epoch=3)


def test_a_whole_version_arrives_bit_for_bit(client, puppet):
    puppet.will("GET /v1/fragments/1/versions/4", 200, frame("whole", 4))
    found = client.whole(1, 4)
    assert vector_digest(found.values()) == found.header.published


def test_a_damaged_version_is_fetched_again(client, puppet, patience):
    data = frame("whole", 4)
    puppet.will("GET /v1/fragments/1/versions/4", 200, data[:-1] + b"?")
    puppet.will("GET /v1/fragments/1/versions/4", 200, data)
    assert client.whole(1, 4).header.version == 4
    assert len(patience.pauses) == 1


@pytest.mark.parametrize(
    "data",
    [
        frame("whole", 5),
        frame("delta", 4),
        frame("whole", 4, fragment=0),
        frame("whole", 4, run="other-2"),
        frame("whole", 4, layout="6" * 64),
        frame("whole", 4, size=60),
        frame("whole", 4) + b"\0" * (2 << 20),
    ],
    ids=["version", "kind", "fragment", "run", "layout", "size", "endless"],
)
def test_anything_but_the_version_asked_for_is_refused(puppet, patience, data):
    puppet.will("GET /v1/run", 200, RUN).will("GET /v1/fragments/1/versions/4", 200, data)
    with (
        Client(puppet.url, Options(retry=ONCE), stop=patience) as client,
        pytest.raises(WireError),
    ):
        client.whole(1, 4)


def test_a_version_that_was_pruned_is_gone(client, puppet):
    puppet.refuses("GET /v1/fragments/1/versions/4", 410, "pruned", "Version 4 is gone.")
    with pytest.raises(Gone, match="Version 4 is gone"):
        client.whole(1, 4)
    with pytest.raises(Gone, match="There is no fragment 2; the run has 2"):
        client.whole(2, 4)


def test_a_chain_leads_from_one_version_to_another(client, puppet):
    key = "GET /v1/fragments/1/versions/4?from=2"
    puppet.will(key, 200, frame("delta", 3) + frame("delta", 4))
    frames = client.chain(1, 4, 2)
    assert frames and [each.header.version for each in frames] == [3, 4]
    puppet.refuses(key, 404, "pruned", "Gone.")
    assert client.chain(1, 4, 2) is None


@pytest.mark.parametrize(
    "data", [b"", frame("delta", 3), frame("delta", 4), frame("delta", 4) + frame("delta", 5)]
)
def test_a_chain_of_other_links_is_refused(puppet, patience, data):
    puppet.will("GET /v1/run", 200, RUN).will("GET /v1/fragments/1/versions/4?from=2", 200, data)
    with (
        Client(puppet.url, Options(retry=ONCE), stop=patience) as client,
        pytest.raises(WireError),
    ):
        client.chain(1, 4, 2)


WEIGHTS = save({"embed": np.ones((10, 11), np.float32)}, {"run": "quickstart-1", "versions": "[4]"})


def test_weights_become_a_file_that_opens(client, puppet, tmp_path):
    out = tmp_path / "model.safetensors"
    puppet.will("GET /v1/weights", 200, WEIGHTS)
    assert client.weights(out)["run"] == "quickstart-1"
    with safe_open(out, "numpy") as opened:
        np.testing.assert_array_equal(opened.get_tensor("embed"), 1.0)
    assert list(tmp_path.iterdir()) == [out]


def test_weights_that_arrive_cut_are_fetched_again(client, puppet, tmp_path):
    out = tmp_path / "model.safetensors"
    puppet.will("GET /v1/weights?version=4", 200, WEIGHTS[:-1])
    puppet.will("GET /v1/weights?version=4", 200, WEIGHTS)
    client.weights(out, version=4)
    assert out.read_bytes() == WEIGHTS


@pytest.mark.parametrize("client", ["httpx"], indirect=True)  # The other may see the break first.
@pytest.mark.parametrize("cut", [100, len(WEIGHTS)])
def test_weights_go_on_where_the_line_broke_even_after_the_last_byte(client, puppet, tmp_path, cut):
    out, etag = tmp_path / "model.safetensors", {"etag": '"4"'}
    puppet.will("GET /v1/weights", 200, WEIGHTS, etag, cut=cut)
    puppet.will("GET /v1/weights", 206, WEIGHTS[cut - 1 :], etag)
    client.weights(out)
    assert out.read_bytes() == WEIGHTS
    asked = [each["headers"].get("range") for each in puppet.heard() if "weights" in each["key"]]
    assert asked == [None, f"bytes={cut - 1}-"], "a range without bytes would be refused"


def test_weights_that_never_arrive_leave_the_old_file_alone(client, puppet, tmp_path):
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"old")
    for _ in range(5):
        puppet.will("GET /v1/weights", 200, b"\xff" * 100)
    with pytest.raises(WireError, match="arrived damaged"):
        client.weights(out)
    assert out.read_bytes() == b"old" and list(tmp_path.iterdir()) == [out]


def test_weights_need_a_place_to_go(client, puppet, tmp_path):
    puppet.will("GET /v1/weights", 200, WEIGHTS)
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        client.weights(tmp_path / "nowhere" / "model.safetensors")


def test_stop_is_a_request_like_any_other(client, puppet):
    puppet.will("POST /v1/stop", 202, {"state": "stopped"})
    assert client.stop().state == "stopped"


def test_each_thread_may_have_a_client_of_its_own(puppet, patience):
    puppet.will("GET /v1/run", 200, RUN)
    with Client(puppet.url, stop=patience) as first:
        first.run()
    for _ in range(8):
        puppet.will("GET /v1/fragments/1/versions/4", 200, frame("whole", 4))
        puppet.will("GET /v1/run", 200, RUN)
    found: list[int] = []

    def work() -> None:
        with Client(puppet.url, stop=patience) as client:
            found.append(client.whole(1, 4).header.version)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [4] * 8


def test_making_a_client_opens_no_connection(tmp_path: Path):
    with Client("http://127.0.0.1:1/") as client:
        assert client.url == "http://127.0.0.1:1"
