"""What people and programs see of a run.

In come events, which every process of a run appends to its log, and the status document, which
the server builds. Out go the same facts as JSON, tables, a page and metrics. Read status.py
first: everything that is shown is in it.

    dashboard.py   the status as one HTML page
    event_file.py  the file of the run log: many writers, two generations, readers by id
    events.py      the kinds of events, and how one is written and read
    last_known.py  what the run log still tells when the server does not answer
    metrics.py     goodput, participation, staleness, recoveries: each figure defined once
    prometheus.py  the status in Prometheus' text format
    status.py      the documents: status, summary, last known state
    terminal.py    the status as tables and progress lines
    units.py       numbers, bytes and durations as people read them
"""
