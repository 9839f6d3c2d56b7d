#!/bin/sh
# Aggregates this run on this host. Started again, it goes on where it stopped.
# With certificates (diloco certs init --host NAME) it listens to other hosts, over TLS, and lets
# in whoever has a credential of this run; without them, it listens to this host only.
set -eu
cd "$(dirname "$0")"
if ! command -v diloco >/dev/null 2>&1; then
    echo "error: the command diloco is not on the PATH of this host" >&2
    echo "hint: install it (make install in a clone of its repository) and activate its .venv" >&2
    exit 2
fi
if [ -f certs/server.pem ]; then
    set -- --set server.certs=certs --set server.listen=0.0.0.0:PORT \
        --set server.admit=credentialed "$@"
fi
exec diloco serve run.yaml "$@"
