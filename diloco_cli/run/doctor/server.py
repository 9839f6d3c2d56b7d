"""Can the server be reached from here, and is it the right one?"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx

from diloco_cli.errors import DilocoError
from diloco_cli.net.backends import make_httpx_client
from diloco_cli.net.connection import checked_url
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import ONCE, Options
from diloco_cli.plan.needs import gbit
from diloco_cli.plan.plan import Plan
from diloco_cli.run.ask import SOON
from diloco_cli.run.doctor.host import Check
from diloco_cli.run.doctor.probe import measure
from diloco_cli.wire import messages
from diloco_cli.wire.messages import WIRE_VERSION

SKEW = 30.0
"""Seconds between two clocks from which on logs and certificates mislead."""
SOON_DAYS = 14


def server(url: str, plan: Plan | None, credentials: Credentials = NOBODY) -> Iterator[Check]:
    """Looks at the way to a server step by step; ends at the first that fails."""
    url = checked_url(url)
    for look in (_connect, lambda url: _certificate(url, credentials)):
        check = look(url)
        yield check
        if check.state == "fail":
            return
    try:
        with make_httpx_client(url, Options(timeouts=SOON, credentials=credentials)) as client:
            response = client.get(messages.RUN)
    except httpx.HTTPError as error:
        fix = "Compare the URL with the one that `diloco serve` printed; a proxy may be in between."
        yield Check("HTTP/2", "fail", f"{url} does not speak it: {error}", fix)
        return
    yield _protocol(response)
    yield _clock(response)
    run = _run_document(response)
    yield _wire(url, response, run)
    if run is None:
        return
    if plan is not None:
        yield _same_run(run, plan)
    yield _link(url, plan, credentials)


def _connect(url: str) -> Check:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        began = time.monotonic()
        socket.create_connection((parts.hostname or "", port), timeout=SOON.connect).close()
    except OSError as error:
        fix = "Is the server up, and is a tunnel or a firewall in the way? Try it on its own host."
        return Check("reachable", "fail", f"{parts.hostname}:{port}: {error}", fix)
    took = 1000 * (time.monotonic() - began)
    return Check("reachable", "ok", f"{parts.hostname}:{port} answers within {took:.1f} ms")


def _certificate(url: str, credentials: Credentials) -> Check:
    parts = urlsplit(url)
    if parts.scheme != "https":
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        fix = "" if local else "Use a tunnel: everybody on the way can read and change what passes."
        return Check("TLS", "ok" if local else "warn", "the connection is not encrypted", fix)
    try:
        context = credentials.context()
        with (
            socket.create_connection(
                (parts.hostname or "", parts.port or 443), SOON.connect
            ) as raw,
            context.wrap_socket(raw, server_hostname=parts.hostname) as secure,
        ):
            ends = ssl.cert_time_to_seconds(str((secure.getpeercert() or {}).get("notAfter")))
    except ssl.SSLCertVerificationError as error:
        fix = "Name the bundle from `diloco certs issue` with --certs, or renew the certificate."
        return Check("TLS", "fail", f"the certificate is not trusted: {error.verify_message}", fix)
    except (OSError, ValueError) as error:
        return Check("TLS", "fail", f"no secure connection: {error}", "Is this an https server?")
    days = (ends - time.time()) / 86400
    text = f"the certificate is good for {days:.0f} more days"
    return Check("TLS", "ok" if days > SOON_DAYS else "warn", text, "Renew it soon.")


def _protocol(response: httpx.Response) -> Check:
    if response.http_version != "HTTP/2":
        fix = "A proxy in between must pass HTTP/2 on; large bodies crawl without it."
        return Check("HTTP/2", "fail", f"answers come as {response.http_version}", fix)
    return Check("HTTP/2", "ok", "spoken")


def _clock(response: httpx.Response) -> Check:
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return Check("clock", "ok", "the server does not say what time it is")
    apart = abs(time.time() - there)
    text = f"{apart:.0f} s apart from the server's"
    if apart > SKEW:
        return Check("clock", "fail", text, "Start a time service: timedatectl set-ntp true.")
    return Check("clock", "ok", text)


def _run_document(response: httpx.Response) -> Mapping[str, object] | None:
    try:
        document = response.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) and "run" in document else None


def _wire(url: str, response: httpx.Response, run: Mapping[str, object] | None) -> Check:
    if run is None:
        fix = "Compare the URL with the one that `diloco serve` printed."
        if response.status_code in (401, 403):
            fix = "Show who you are: --certs FOLDER, or DILOCO_TOKEN_FILE."
        return Check("server", "fail", f"{url} answered {response.status_code}, no run", fix)
    theirs = run.get("wire")
    if theirs != WIRE_VERSION:
        fix = "Install the same version of diloco on both sides."
        return Check("wire", "fail", f"version {theirs} there, {WIRE_VERSION} here", fix)
    return Check("wire", "ok", f"version {theirs} on both sides, run {run['run']}")


def _same_run(run: Mapping[str, object], plan: Plan) -> Check:
    from diloco_cli.assemble import resolve, shared_digest

    ours = {
        "spec_digest": shared_digest(plan.spec),
        "layout_digest": resolve(plan.spec).layout.digest,
    }
    other = [key.partition("_")[0] for key, digest in ours.items() if run.get(key) != digest]
    if other:
        fix = "Give this host the server's spec; `GET /v1/run` shows what must agree."
        return Check("spec", "fail", f"the server runs another {' and '.join(other)}", fix)
    return Check("spec", "ok", "the server runs the same")


def _link(url: str, plan: Plan | None, credentials: Credentials) -> Check:
    try:
        link = measure(url, retry=ONCE, credentials=credentials)
    except DilocoError as error:
        return Check("link", "fail", error.message, error.hint or "")
    text = f"{gbit(link.rate)} down, {1000 * link.round_trip:.1f} ms"
    if plan is None:
        return Check("link", "ok", text)
    need = plan.needs.need_down
    text += f"; {gbit(need)} keep {plan.target:.0%} of the pace"
    if link.rate < need:
        return Check("link", "warn", text, "`diloco plan --probe` says what to change in the spec.")
    return Check("link", "ok", text)
