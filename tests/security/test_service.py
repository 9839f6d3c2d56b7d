"""A guarded server as a service: SIGHUP, probes without a certificate, and bad credentials."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from diloco_cli.launch.ports import free_addresses
from diloco_cli.server.access.roles import BAD_CREDENTIALS
from diloco_cli.server.http.audit import TURNED_AWAY
from tests.security.tls_server import Guarded, client, mixed

pytestmark = pytest.mark.live


def test_a_service_takes_up_what_changed_and_tells_probes_how_it_is(own: Callable[..., Guarded]):
    (health,) = free_addresses(1)
    running = own(server={"health": health})
    probed = httpx.get(f"http://{health}/healthz", trust_env=False, timeout=60)
    assert probed.status_code == 200 and probed.json()["ok"] is True
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{running.url}/healthz", verify=False, trust_env=False, timeout=60)
    running.child.send_signal(signal.SIGHUP)
    running.until("SIGHUP: certificates and tokens are up to date")
    with client(running.url, running.vault.identity("read", "new")) as asked:
        assert asked.get("/v1/status").status_code == 200


def test_bad_credentials_are_told_to_wait_and_leave_few_lines(own: Callable[..., Guarded]):
    running = own()
    paris = running.vault.identity("upload", "paris")
    answers = list[httpx.Response]()
    with client(running.url, mixed(paris, "diloco.trial.paris.GUESSED")) as asked:
        # They run out more slowly where the machine is slow: two more may come every second.
        while len(answers) < 20 * BAD_CREDENTIALS[0]:
            with suppress(httpx.RemoteProtocolError):  # Strangers are cut off after a while.
                answers.append(asked.get("/v1/status"))
            if answers and answers[-1].status_code != 401:
                break
    assert len(answers) > BAD_CREDENTIALS[0] and answers[-1].status_code == 429
    assert answers[-1].headers["retry-after"] == "60"
    with client(running.url, paris) as asked:
        assert asked.get("/v1/run").status_code == 200, "a good one is never told to wait"
    refused = [line for line in running.audit() if line["outcome"] == "refused"]
    assert 0 < len(refused) <= 2 * TURNED_AWAY[0] < len(answers)
