#!/bin/sh
# Trains the region REGION on this host. It needs the server's URL and, unless the server is on
# this host or behind a tunnel, the folder certs/regions/REGION from the server's host:
#   ./start-REGION.sh https://SERVER-HOST:PORT     or     DILOCO_SERVER=https://… ./start-REGION.sh
set -eu
cd "$(dirname "$0")"
case "${1:-}" in
http://* | https://*)
    DILOCO_SERVER=$1
    shift
    ;;
esac
if [ -z "${DILOCO_SERVER:-}" ]; then
    echo "error: region REGION does not know where the server is" >&2
    echo "hint: $0 https://SERVER-HOST:PORT" >&2
    exit 2
fi
if ! command -v diloco >/dev/null 2>&1; then
    echo "error: the command diloco is not on the PATH of this host" >&2
    echo "hint: install it (make install in a clone of its repository) and activate its .venv" >&2
    exit 2
fi
case "$DILOCO_SERVER" in
https://*)
    if [ ! -d certs/regions/REGION ]; then
        echo "error: there is no certs/regions/REGION here, which $DILOCO_SERVER asks for" >&2
        echo "hint: on the server's host: diloco certs issue --region REGION --bundle REGION.tar" >&2
        exit 2
    fi
    set -- --certs certs/regions/REGION "$@"
    ;;
esac
exec diloco work run.yaml --region REGION --server "$DILOCO_SERVER" "$@"
