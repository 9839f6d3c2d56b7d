"""Is this Python new enough? Written so that any Python 3 can read it and say so."""

import sys

OLDEST = (3, 11)


def refuse_old_python(version=None):
    """Ends the process with a sentence where our own syntax would end it with a riddle."""
    found = tuple(version or sys.version_info)[:2]
    if found < OLDEST:
        sys.stderr.write(
            "error: diloco needs Python %d.%d or newer, this is %d.%d (%s)\n"  # noqa: UP031
            "hint: run it with a newer one, for example python3.12 -m diloco_cli\n"
            % (OLDEST + found + (sys.executable,))
        )
        raise SystemExit(2)
