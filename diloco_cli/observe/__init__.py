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
    sinks/         the run in TensorBoard, Weights & Biases, OpenTelemetry and CSV files
    status.py      the documents: status, summary, last known state
    terminal.py    the status as tables and progress lines
    units.py       numbers, bytes and durations as people read them
"""
