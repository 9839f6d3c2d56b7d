"""Reachable is not fast: who answers heartbeats is there, whatever else does not get through."""

from __future__ import annotations

from diloco_cli.errors import LinkError
from diloco_cli.net.refusal import refusal
from diloco_cli.worker.agent.link_state import LinkState

GONE = LinkError("http://h cannot be reached")
FULL = refusal("http://h", 507, b'{"error": {"code": "no-room", "message": "needs 67 bytes"}}')


def test_a_server_is_back_with_the_first_heartbeat_however_slow_the_frames_are():
    link = LinkState()
    assert link.failed("upload", GONE, now=1) == "", "perhaps it is gone"
    assert link.failed("heartbeat", GONE, now=2) == GONE.message and link.lost_at == 2
    assert link.failed("heartbeat", GONE, now=3) == link.failed("download", GONE, now=3) == ""
    assert link.hindrance == "", "that the server is away says it all"
    assert link.worked("heartbeat", began=8.5, now=9) == (7, "", "") and link.lost_at is None


def test_what_does_not_get_through_while_heartbeats_do_is_said_until_it_does():
    link, told = LinkState(), "uploads do not get through: " + GONE.message
    assert link.failed("upload", GONE, now=1) == ""
    assert link.worked("heartbeat", began=0, now=2) == (None, "", ""), "it was answered before"
    assert link.worked("heartbeat", began=1.5, now=2) == (None, "", told) and link.hindrance == told
    assert link.failed("upload", GONE, now=3) == ""
    assert link.worked("heartbeat", began=3.5, now=4) == (None, "", ""), "once is enough"
    assert link.worked("upload", began=29.5, now=30) == (None, told, "") and link.hindrance == ""


def test_a_server_without_room_is_in_reach():
    link = LinkState()
    told = "uploads do not get through: http://h answered 507: needs 67 bytes"
    assert link.failed("upload", FULL, now=1) == link.hindrance == told
    assert link.failed("upload", FULL, now=2) == "", "once is enough"
    assert link.failed("heartbeat", FULL, now=3).startswith("heartbeat") and link.lost_at is None


def test_a_full_disk_of_the_regions_own_is_no_matter_of_the_link():
    link, full = LinkState(), OSError(28, "No space left on device")
    told = "this folder cannot be written: [Errno 28] No space left on device"
    assert link.failed("heartbeat", full, now=1) == told
    assert link.failed("download", full, now=1) == "" and link.lost_at is None
    assert link.hindrance == told
    link.worked("heartbeat", began=1.5, now=2)
    assert link.hindrance == told, "versions cannot be written yet"
    link.worked("download", began=2.5, now=3)
    assert link.hindrance == ""
