#!/bin/sh
# Aggregates this run on this host. Started again, it goes on where it stopped.
set -eu
cd "$(dirname "$0")"
if ! command -v diloco >/dev/null 2>&1; then
    echo "error: the command diloco is not on the PATH of this host" >&2
    echo "hint: pip install diloco-cli, or activate the environment it is in" >&2
    exit 2
fi
exec diloco serve run.yaml "$@"
