"""What people and programs see of a run: events, the status document, metrics, terminal, page.

dashboard.py     A plain page that tells the truth about a run
event_file.py    A file that several processes append lines to, in two generations of a …
event_reader.py  reading the run log in order while it is written, moved on, or deleted
events.py        what happened, in order: the run log
metrics.py       what it adds up to: figures from events and status documents
terminal.py      tables and progress for people
units.py         numbers as people read them, the same in the terminal and on the page
"""
