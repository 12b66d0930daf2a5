"""The quiet check Q: after the last request nothing of it is left anywhere.

What a process holds is asked through its public doors only: load, health, a fresh request, and how it ends.
A service that is told to stop leaves as soon as no request is left in it: an executor when it holds no
sequence, a scheduler when nothing runs or waits, a router when no call is open. One that forgot to let
something go would wait for its whole grace, which is longer than `check_all_leave` allows between two lines
of its log. How long the process then takes to be gone says how busy the machine is.
"""

import re
import time
from datetime import datetime

from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.rig.client import request
from tests.rig.cluster import Cluster
from tests.rig.oracle import Oracle

QUIET_SECONDS = 5.0
LEAVE_SECONDS = 5.0
GONE_SECONDS = 60.0
POLL_SECONDS = 0.02
PROBE = [7, 77, 177, 7, 77]
PROBE_TOKENS = 8


def check_quiet(cluster: Cluster, oracle: Oracle | None = None) -> None:
    """Q, as far as processes that go on can tell. Raises AssertionError.

    `oracle` knows the model of the cluster; without one the fresh probe must only come to its end.
    """
    wait_until_idle(cluster)
    for name in ("executor", "scheduler", "router"):
        wait_until_well(cluster, name)
    response = cluster.router.Complete(request(PROBE, max_tokens=PROBE_TOKENS), timeout=30)
    assert len(response.choices[0].token_ids) == PROBE_TOKENS
    if oracle is not None:
        oracle.check(PROBE, response.choices[0].token_ids)
    wait_until_idle(cluster)


def wait_until_well(cluster: Cluster, name: str) -> None:
    """Returns when a service says SERVING: where an executor was just lost, the news has to come by first."""
    check = health_pb2_grpc.HealthStub(cluster.channel(name)).Check
    deadline = time.monotonic() + QUIET_SECONDS
    while check(health_pb2.HealthCheckRequest(), timeout=5).status != health_pb2.HealthCheckResponse.SERVING:
        assert time.monotonic() < deadline, f"after {QUIET_SECONDS} s the {name} does not serve"
        time.sleep(POLL_SECONDS)


def wait_until_idle(cluster: Cluster, within_seconds: float = QUIET_SECONDS) -> None:
    """Returns when nothing runs or waits and every block is free."""
    deadline = time.monotonic() + within_seconds
    while True:
        load = cluster.load()
        if load.num_running == load.num_waiting == 0 and load.num_free_blocks == load.num_blocks:
            return
        assert time.monotonic() < deadline, f"after {within_seconds} s: {MessageToDict(load)}"
        time.sleep(POLL_SECONDS)


def check_all_leave(cluster: Cluster) -> None:
    """The rest of Q: each process, told to stop, finds that it holds nothing. Ends the cluster.

    The executor first, while the scheduler is connected: without a scheduler it would leave in any case.
    """
    wait_until_idle(cluster)
    for name in ("executor", "router", "scheduler"):
        process = cluster.process(name)
        assert cluster.stop(name, GONE_SECONDS) == 0, f"the {name} did not end well"
        seconds = _logged_at(process.stderr, "stopped") - _logged_at(process.stderr, "draining")
        assert seconds < LEAVE_SECONDS, f"the {name} took {seconds:.1f} s to leave"


def _logged_at(log: str, event: str) -> float:
    """When a service told this, seconds of its clock."""
    told = rf'(\] |"event": "){event}\b'  # for people, and as JSON
    (line,) = (line for line in log.splitlines() if re.search(told, line))
    stamp = re.search(r"\d{4}-\d\d-\d\dT[\d:.]+", line)
    assert stamp is not None, line
    return datetime.fromisoformat(stamp.group()).timestamp()
