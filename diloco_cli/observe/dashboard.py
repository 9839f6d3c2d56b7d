"""A plain page that tells the truth about a run.

Rendered whole on the server, so it also reads well in a text browser; a few lines of
inline script swap in a fresh copy every two seconds. No outside resources, no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_cli.observe.metrics import GOODPUTS, warnings
from diloco_cli.observe.units import amount, bits, bytes_, loss, percent, seconds, state_of

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
    note.textContent = 'The server does not answer; this is the last it said.';
    note.className = 'stale';
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
"""

Status = Mapping[str, Any]


def page(status: Status) -> str:
    """Renders a status document as one self-contained HTML page."""
    name = escape(str(status.get("name") or status.get("run") or "run"))
    state = escape(str(status.get("state", "unknown")))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{name}: {state}</title><style>{_STYLE}</style></head><body>"
        f"<p id='link'></p><main id='live'>{_live(status, name, state)}</main>"
        f"{_links()}<script>{_SCRIPT}</script></body></html>\n"
    )


def _live(status: Status, name: str, state: str) -> str:
    tokens = status.get("tokens") or {}
    applied, budget = tokens.get("applied") or 0, tokens.get("budget") or 0
    return (
        f"<h1>{name}: {state}</h1>"
        f"<p class='quiet'>run {escape(str(status.get('run', '')))}</p>{_why(status)}"
        f"<progress max='{float(budget) or 1}' value='{float(applied)}'></progress>"
        f"<p>{amount(applied)} of {amount(budget)} tokens applied</p>"
        f"{_facts(status)}{_regions(status.get('regions') or [])}"
    )


def _why(status: Status) -> str:
    why = f"<p>{escape(str(status['why']))}</p>" if status.get("why") else ""
    return why + "".join(f"<p class='no'>! {escape(alarm)}</p>" for alarm in warnings(status))


def _facts(status: Status) -> str:
    losses, wire = status.get("loss") or {}, status.get("wire") or {}
    tokens, goodputs = status.get("tokens") or {}, status.get("goodputs") or {}
    facts = [
        ("held-out loss", loss(losses.get("heldout"))),
        ("training loss", loss(losses.get("train"))),
        ("outer steps", amount(status.get("outer_steps"))),
        ("bits a parameter, up", bits(wire.get("bits_per_parameter_up"))),
        ("bits a parameter, down", bits(wire.get("bits_per_parameter_down"))),
        ("moved up / down", f"{bytes_(wire.get('bytes_up'))} / {bytes_(wire.get('bytes_down'))}"),
        ("goodput", percent(status.get("goodput"))),
        *((f"goodput: {name}", percent(goodputs.get(name))) for name in GOODPUTS),
        ("tokens pending", amount(tokens.get("pending"))),
        ("tokens refused", amount(tokens.get("refused"))),
        ("tokens discarded", amount(tokens.get("discarded"))),
    ]
    return (
        "<div class='facts'>"
        + "".join(f"<div>{escape(label)}<b>{escape(value)}</b></div>" for label, value in facts)
        + "</div>"
    )


def _regions(regions: Sequence[Status]) -> str:
    heads = ("region", "state", "step", "loss", "tokens/s", "share", "behind", "last merged")
    head = "".join(f"<th>{text}</th>" for text in heads)
    rows = "".join(_region(region) for region in regions)
    return (
        f"<h2>Regions</h2><div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows or '<tr><td colspan=8>none has joined yet</td></tr>'}</tbody></table></div>"
    )


def _region(region: Status) -> str:
    word = state_of(region)
    mood = {"contributing": "yes", "done": "yes", "away": "no", "failed": "no"}.get(word, "")
    why = escape(str(region.get("why") or ""))
    cells = (
        amount(region.get("step")),
        loss(region.get("loss")),
        amount(region.get("tokens_per_second")),
        percent(region.get("share")),
        amount(region.get("staleness")),
        seconds(region.get("last_merged_seconds")),
    )
    return (
        f"<tr><td>{escape(str(region.get('name', '?')))}</td>"
        f"<td><span class='{mood}'>{escape(word)}</span> <span class='quiet'>{why}</span></td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
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
