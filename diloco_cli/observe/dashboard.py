"""The status of a run as one HTML page.

Rendered whole on the server, so it also reads well in a text browser; a few lines of
inline script swap in a fresh copy every two seconds. No outside resources, no framework.
"""

from __future__ import annotations

from html import escape

from diloco_cli.observe.metrics import warnings
from diloco_cli.observe.status import Goodputs, RegionStatus, Status
from diloco_cli.observe.units import amount, bits, bytes_, loss, percent, seconds

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #cf222e; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 64rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
.quiet { opacity: .7; } .stale { color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .5rem; }
.facts div { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .6rem; }
.facts b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
progress { width: 100%; height: .8rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; }
.yes { color: var(--good); } .no { color: var(--bad); }
"""

# The page asks for the status first: it is the document programs read, and a server that
# no longer answers it must not look alive because of a cached page.
_SCRIPT = """
async function refresh() {
  const note = document.getElementById('link');
  try {
    const status = await (await fetch('/v1/status', {cache: 'no-store'})).json();
    const page = await (await fetch('/', {cache: 'no-store'})).text();
    const fresh = new DOMParser().parseFromString(page, 'text/html');
    document.getElementById('live').replaceWith(fresh.getElementById('live'));
    document.title = fresh.title;
    note.textContent = ''; note.className = '';
    if (['finished', 'stopped'].includes(status.state)) return;
  } catch (error) {
    note.textContent = 'The server does not answer; this is its last answer.';
    note.className = 'stale';
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
"""


def page(status: Status) -> str:
    """Renders a status document as one self-contained HTML page."""
    title = f"{escape(status.name)}: {escape(status.state)}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        f"<p id='link'></p><main id='live'><h1>{title}</h1>{_live(status)}</main>"
        f"{_links()}<script>{_SCRIPT}</script></body></html>\n"
    )


def _live(status: Status) -> str:
    tokens = status.tokens
    why = f"<p>{escape(status.why)}</p>" if status.why else ""
    alarms = "".join(f"<p class='no'>! {escape(alarm)}</p>" for alarm in warnings(status))
    return (
        f"<p class='quiet'>run {escape(status.run)}</p>{why}{alarms}"
        f"<progress max='{float(tokens.budget)}' value='{tokens.applied}'></progress>"
        f"<p>{amount(tokens.applied)} of {amount(tokens.budget)} tokens applied</p>"
        f"{_facts(status)}{_regions(status)}"
    )


def _facts(status: Status) -> str:
    losses, wire, tokens = status.loss, status.wire, status.tokens
    facts = [
        ("held-out loss", loss(losses.heldout)),
        ("training loss", loss(losses.train)),
        ("outer steps", amount(status.outer_steps)),
        ("bits per parameter, up", bits(wire.bits_per_parameter_up)),
        ("bits per parameter, down", bits(wire.bits_per_parameter_down)),
        ("moved up / down", f"{bytes_(wire.bytes_up)} / {bytes_(wire.bytes_down)}"),
        ("goodput", percent(status.goodput)),
        *((f"goodput: {n}", percent(getattr(status.goodputs, n))) for n in Goodputs.model_fields),
        ("tokens pending", amount(tokens.pending)),
        ("tokens refused", amount(tokens.refused)),
        ("tokens discarded", amount(tokens.discarded)),
    ]
    boxes = "".join(f"<div>{label}<b>{value}</b></div>" for label, value in facts)
    return f"<div class='facts'>{boxes}</div>"


def _regions(status: Status) -> str:
    heads = ("region", "state", "step", "loss", "tokens/s", "share", "behind", "last merged")
    head = "".join(f"<th>{text}</th>" for text in heads)
    rows = "".join(_region(region) for region in status.regions)
    return (
        f"<h2>Regions</h2><div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _region(region: RegionStatus) -> str:
    state = region.state
    mood = {"contributing": "yes", "done": "yes", "away": "no", "failed": "no"}.get(state, "")
    cells = (
        amount(region.step),
        loss(region.loss),
        amount(region.tokens_per_second),
        percent(region.share),
        amount(region.staleness),
        seconds(region.last_merged_seconds),
    )
    return (
        f"<tr><td>{escape(region.name)}</td><td><span class='{mood}'>{state}</span> "
        f"<span class='quiet'>{escape(region.why)}</span></td>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _links() -> str:
    links = {
        "/v1/status": "status as JSON",
        "/metrics": "Prometheus metrics",
        "/v1/weights": "weights as safetensors",
        "/openapi.json": "the API",
    }
    listed = " · ".join(f"<a href='{url}'>{text}</a>" for url, text in links.items())
    return f"<p class='quiet'>{listed}</p>"
