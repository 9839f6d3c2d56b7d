"""The run as one HTML page: a status document and the history in, a whole page out. Start with
document.py.

    document.py     the page, part by part
    report.py       a run that is over, or several beside each other, as one file to send
    pictures.py     its curves as PNG files
    records.py      records of chaos and of quality, as parts of a report
    log_digest.py   what the run log tells a report: faults, outages, how rounds went
    curves.py       the curves of a run: the history in, drawings out
    charts.py       lines over tokens or time, as SVG
    round_chart.py  the last rounds: who was called, answered, merged, adopted
    round_story.py  one round, magnified and in words
    region_table.py the regions, a row each
    event_list.py   what happened, with filters
    figures.py      headings, figures in rows and bars
    marks.py        a region's colour and shape
    sparkline.py    a curve as small as a word
    style.css       how it looks
    live.js         swaps in newer parts when something happened, and reads values off the charts

Everything is drawn here, so the page reads without its script, and a report can use the same
drawings. Nothing comes from another host.
"""

from diloco_cli.observe.page.document import POLICY, View, page

__all__ = ["POLICY", "View", "page"]
