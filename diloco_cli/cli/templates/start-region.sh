#!/bin/sh
# Trains the region REGION on this host. It needs the server's URL and nothing else:
#   ./start-REGION.sh http://127.0.0.1:PORT        or        DILOCO_SERVER=http://… ./start-REGION.sh
# From another host, open a tunnel first:  ssh -N -L PORT:127.0.0.1:PORT SERVER-HOST
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
    echo "hint: $0 http://127.0.0.1:PORT" >&2
    exit 2
fi
if ! command -v diloco >/dev/null 2>&1; then
    echo "error: the command diloco is not on the PATH of this host" >&2
    echo "hint: pip install diloco-cli, or activate the environment it is in" >&2
    exit 2
fi
exec diloco work run.yaml --region REGION --server "$DILOCO_SERVER" "$@"
