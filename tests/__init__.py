"""The tests mirror the package; `tests/verify` holds the long verification programs."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL_SERVER = ("-m", "tests.server.small_server")
"""Arguments of Python, in ROOT, that start a small server as a process: then FOLDER [CHANGES]."""
