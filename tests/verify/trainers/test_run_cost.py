"""The uploads of a run are timed from the call that they answer."""

from __future__ import annotations

from diloco_cli.observe.events import Event
from tests.verify.trainers.run_cost import upload_seconds


def test_an_upload_is_timed_from_the_call_that_it_answers():
    moments = [
        ("accepted", 0, 0.5),  # Before any call: it is no answer.
        ("called", 0, 1.0),
        ("called", 1, 2.0),
        ("accepted", 1, 2.25),
        ("accepted", 0, 4.0),
        ("closed", 0, 5.0),
        ("accepted", 0, 9.0),  # For the next round.
        ("accepted", 1, 3.0),
    ]
    events = [Event(kind, "server", at, at, {"fragment": of}) for kind, of, at in moments]
    assert upload_seconds(events) == 1.0
