"""What people and programs see of a run.

In come events, which every process of a run appends to its log, and the status document, which
the server builds. Out go the same facts as JSON, tables, a page and metrics. Read status.py
first: everything that is shown is in it.

    event_file.py  the file of the run log: many writers, two generations, readers by id
    events.py      the kinds of events, and how one is written and read
    history.py     the whole run as curves, its last rounds moment by moment, in bounded memory
    last_known.py  what the run log still tells when the server does not answer
    metrics.py     goodput, participation, staleness, recoveries: each figure defined once
    metrics_file.py  a region's training as lines on disk, and their reader
    page/          the run as one HTML page
    prometheus.py  the status in Prometheus' text format
    run_record.py  what a run left behind, as columns: `read_run`
    seen_run.py    the past of a run, for somebody who looks at it again and again
    sinks/         the run in TensorBoard, Weights & Biases, OpenTelemetry and CSV files
    status.py      the documents: status, summary, last known state
    status_view.py a status as a picture for a terminal, or a plain line
    terminal.py    what people see of a run in a terminal, and the summary
    text_charts.py curves and rounds drawn with letters
    units.py       numbers, bytes and durations as people read them
"""
