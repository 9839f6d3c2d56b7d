"""The tests mirror the package; `tests/verify` holds the long verification programs.

conftest.py         what every test runs under
reference_pages.py  writes docs/reference from the code (`make docs`)
site_pages.py       what a site of docs/ needs that a repository does not
bench/        benchmarks measure what they say, on small models
chaos/        faults that are inflicted, and what is reported of them
cli/          commands as people type them
conformance/  what every kind of a seam must do, run against each
core/         decisions, without clock, disk or network
data/         text, its order, and what is held out
launch/       processes that are started, watched and stopped
live/         real processes and sockets, slower than the rest
merge/        many contributions become the next version, to the bit
models/       models compute what their formulas say
net/          the client against servers that misbehave
observe/      the run log, the status document, and how people see them
region/       training loops of others, as regions
run/          one run on this machine, and its folder
scenarios/    stories in plain words, played on a virtual clock with the functions of the core
security/     who may do what, over TLS, and who may not
server/       the server, in this process, its clock turned by hand
sim/          a simulated run decides as a live one
spec/         run specs: what is read, and what is said about mistakes
system/       what we need of the operating system
verify/       long verification programs, each with a short test beside it
wire/         arrays to bytes and back; frames that no encoder writes
worker/       a region's agent and its trainer
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL_SERVER = ("-m", "tests.server.small_server")
"""Arguments of Python, in ROOT, that start a small server as a process: then FOLDER [CHANGES]."""
