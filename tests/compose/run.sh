#!/usr/bin/env bash
# Brings the real stack up with a real Docker engine and asks it a question.
#
# What is there is used: a running engine, a base image that can be pulled. Where there is none, dockerd is
# started for the time of the test and a base image is made from Debian packages (both need root). Wheels are
# fetched by this machine's pip, as it is configured, so that the build itself needs no network.
#
# Needs: docker, docker-compose, prometheus where its image cannot be pulled, a .venv made by `make test`,
# models/smollm2. Leaves wheels in tests/compose/.work and, where it had to start an engine, that engine's images in
# the user's cache.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=tests/compose/.work
engine=${XDG_CACHE_HOME:-$HOME/.cache}/chairlift-compose
python=.venv/bin/python
export COMPOSE_PROJECT_NAME=chairlift-test
export BASE_IMAGE=${BASE_IMAGE:-python:3.12-slim}
export WHEELS=$work/wheels
dockerd_pid=
mkdir -p "$work"

compose() {
    if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi
}

say() { printf '\n== %s\n' "$*"; }

finish() {
    status=$?
    trap - EXIT
    [[ $status -eq 0 ]] || compose logs --tail 20 || true
    compose down --volumes --timeout 20 || true
    if [[ -n $dockerd_pid ]]; then
        kill "$dockerd_pid" && wait "$dockerd_pid" || true
    fi
    [[ $status -eq 0 ]] && say "passed" || say "FAILED"
    exit "$status"
}

start_engine() {
    say "no Docker engine answers: starting one"
    mkdir -p "$engine"
    export DOCKER_HOST=unix://$engine/docker.sock
    dockerd --host "$DOCKER_HOST" --data-root "$engine/data" --exec-root "$engine/exec" \
        --pidfile "$engine/pid" >"$work/dockerd.log" 2>&1 &
    dockerd_pid=$!
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        kill -0 "$dockerd_pid" 2>/dev/null || break
        sleep 0.5
    done
    tail -5 "$work/dockerd.log"
    return 1
}

make_base_image() {
    export BASE_IMAGE=chairlift-test-base
    docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && return
    say "the base image cannot be pulled: making one"
    # shellcheck source=/dev/null
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    rootfs=$(mktemp -d)
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$rootfs" >"$work/debootstrap.log"
    ln -s python3 "$rootfs/usr/bin/python"
    tar -C "$rootfs" -c . | docker import - "$BASE_IMAGE"
    rm -rf "$rootfs"
}

fetch_wheels() {
    say "fetching wheels"
    version=$(docker run --rm "$BASE_IMAGE" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    $python - >"$work/requirements.txt" <<'PY'
import tomllib
from pathlib import Path

described = tomllib.loads(Path("pyproject.toml").read_text())
extras = described["project"]["optional-dependencies"]
names = described["build-system"]["requires"] + described["project"]["dependencies"]
print(*names, *extras["router"], *extras["http"], *extras["scheduler"], *extras["executor"], *extras["tracing"], sep="\n")
PY
    $python -m pip download --quiet --quiet --only-binary :all: --python-version "$version" --dest "$WHEELS" \
        --requirement "$work/requirements.txt"
}

# Prometheus' own image, or where that cannot be pulled, this machine's (a Debian package) under its name.
need_prometheus() {
    image=$(sed -n 's/^ *image: \(prom\/prometheus:.*\)/\1/p' docker-compose.yml)
    docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" 2>/dev/null || {
        folder=$(mktemp -d)
        cp "$(command -v prometheus)" "$folder/prometheus"
        printf 'FROM %s\nCOPY prometheus /bin/\nWORKDIR /prometheus\nENTRYPOINT ["/bin/prometheus"]\n' \
            "$BASE_IMAGE" >"$folder/Dockerfile"
        docker build --quiet --tag "$image" "$folder"
        rm -rf "$folder"
    }
}

until_told() { # QUERY VALUE: until Prometheus answers a query with that value
    for _ in $(seq 120); do
        told=$($python - "$1" 2>/dev/null <<'PY'
import json, sys
from urllib.parse import quote
from urllib.request import urlopen

answer = json.load(urlopen("http://127.0.0.1:9090/api/v1/query?query=" + quote(sys.argv[1])))
print(*(sample["value"][1] for sample in answer["data"]["result"]))
PY
        ) && [[ $told == "$2" ]] && return
        sleep 1
    done
    echo "$1 is $told"
    return 1
}

until_healthy() { # CONTAINER…
    for container in "$@"; do
        for _ in $(seq 180); do
            health=$(docker inspect --format '{{.State.Health.Status}}' "$container")
            [[ $health == healthy ]] && break
            sleep 1
        done
        [[ $health == healthy ]] || { echo "$container is $health"; return 1; }
    done
}

ask() {
    answer=$($python -m chairlift generate --chat "What is the capital of France?" --temperature 0 --max-tokens 40 --timeout 60)
    echo "$answer"
    [[ $answer == *Paris* ]]
}

trap finish EXIT
docker info >/dev/null 2>&1 || start_engine
docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 || docker pull --quiet "$BASE_IMAGE" 2>/dev/null || make_base_image
fetch_wheels

say "building"
PIP_NO_INDEX=1 compose build --quiet
for service in router scheduler; do
    docker run --rm --entrypoint python "chairlift-$service" -c \
        'import importlib.util as find; assert find.find_spec("torch") is None, "torch is in the image"'
done
for service in router scheduler executor; do
    [[ $(docker inspect --format '{{.Config.User}}' "chairlift-$service") == chairlift ]]
done

say "starting"
compose up --detach
until_healthy $(compose ps --quiet)
ask

say "with three executors, each service restarted under load"
compose up --detach --no-recreate --scale executor=3
until_healthy $(compose ps --quiet)
ask
scripts/rolling_restart.sh

say "the live page, and a standby that takes over"
$python -c 'import urllib.request as web; assert b"Chairlift" in web.urlopen("http://127.0.0.1:8000/").read()'
compose kill --signal SIGKILL scheduler
ask
compose up --detach --no-recreate --scale executor=3
until_healthy $(compose ps --quiet)
ask

say "with Prometheus: everybody is scraped, and an executor that is killed is an alert"
need_prometheus
compose --profile metrics up --detach --no-recreate --scale executor=3
until_told 'sum(up{job=~"chairlift-.*"})' 6
until_told 'count(ALERTS{alertname="ChairliftExecutorLost"})' ''
docker kill "$(compose ps --quiet executor | head -1)"
until_told 'count(ALERTS{alertname="ChairliftExecutorLost", alertstate="firing"})' 1
ask
compose --profile metrics rm --force --stop prometheus
compose up --detach --no-recreate --scale executor=3
until_healthy $(compose ps --quiet)

say "stopping"
containers=$(compose ps --quiet)
compose stop --timeout 40
for container in $containers; do
    docker inspect --format '{{.Name}} ended with exit code {{.State.ExitCode}}' "$container"
    [[ $(docker inspect --format '{{.State.ExitCode}}' "$container") == 0 ]]
done
