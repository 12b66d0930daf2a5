#!/usr/bin/env bash
# Restarts a stack of docker compose under load, one container after the other, and asks all the time:
#
#   docker compose up --detach --scale executor=3
#   make rolling-restart
#
# Executors first, then the standby, then the scheduler that leads; each is told to stop, hands on what it has, and
# is healthy again before the next one. Fails when a stream fails, or an answer differs from the one before.
# The router stays: it is the clients' own address. Where there are several, clients go on at the next one.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
address=${CHAIRLIFT_ADDRESS:-127.0.0.1:50051}
grace_seconds=40

compose() {
    if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi
}

until_healthy() { # CONTAINER
    for _ in $(seq 180); do
        health=$(docker inspect --format '{{.State.Health.Status}}' "$1")
        [[ $health == healthy ]] && return
        sleep 1
    done
    echo "$1 is $health"
    return 1
}

"$python" scripts/keep_asking.py --address "$address" &
asking=$!
trap 'kill "$asking" 2>/dev/null || true' EXIT

for service in executor standby scheduler; do
    for container in $(compose ps --quiet "$service"); do
        sleep 2
        kill -0 "$asking" || break 2
        name=$(docker inspect --format '{{.Name}}' "$container")
        echo "restarting ${name#/}"
        docker stop --time "$grace_seconds" "$container" >/dev/null
        docker start "$container" >/dev/null
        until_healthy "$container"
    done
done
sleep 2

trap - EXIT
kill -TERM "$asking" 2>/dev/null || true
wait "$asking"
