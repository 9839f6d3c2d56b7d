"""`diloco` and `python -m diloco_cli` start here. Any Python 3 can read this file."""

import sys

OLDEST = (3, 11)


def refuse_old_python(version=None):
    """Ends the process with a sentence where newer syntax would end it with a SyntaxError."""
    running = tuple(version or sys.version_info)[:2]
    if running < OLDEST:
        sys.stderr.write(
            "error: diloco needs Python %d.%d or newer, this is %d.%d (%s)\n"  # noqa: UP031
            "hint: run it with a newer one, for example python3.12 -m diloco_cli\n"
            % (OLDEST + running + (sys.executable,))
        )
        raise SystemExit(2)


def main():
    refuse_old_python()
    from diloco_cli.cli.app import main

    main()


if __name__ == "__main__":
    main()
