"""What each iteration did, as a watcher at the router sees it."""

import contextlib
import threading
from collections.abc import Iterator

import grpc

from protos.v1 import router_pb2
from tests.rig.client import request
from tests.rig.cluster import Cluster

WAIT_SECONDS = 20.0
_PROBE_ID = "watching-probe"


class Watching:
    """The step summaries that have come so far."""

    def __init__(self, cluster: Cluster) -> None:
        self._call = cluster.router.Watch(router_pb2.WatchRequest())
        self._news = threading.Condition()
        self._summaries: list[router_pb2.StepSummary] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):  # cancelled by `close`
            for summary in self._call:
                with self._news:
                    self._summaries.append(summary)
                    self._news.notify_all()

    def steps(self) -> list[router_pb2.StepSummary]:
        """All of them but those of the probe. None may be missing."""
        with self._news:
            assert not any(summary.num_dropped for summary in self._summaries)
            return [step for step in self._summaries if not _is_probe(step)]

    def wait_for_any(self, seconds: float) -> bool:
        """Whether a summary has come, or comes within so long."""
        with self._news:
            return self._news.wait_for(lambda: bool(self._summaries), seconds)

    def steps_until_gone(self, request_id: str) -> list[router_pb2.StepSummary]:
        """All steps up to the one that tells that this request has left."""

        def has_left() -> bool:
            return any(leaver.request_id == request_id for step in self._summaries for leaver in step.left)

        with self._news:
            assert self._news.wait_for(has_left, WAIT_SECONDS), f"{request_id} has not left"
        return self.steps()

    def close(self) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leave it untyped
        self._reader.join(WAIT_SECONDS)


def _is_probe(step: router_pb2.StepSummary) -> bool:
    ids = {member.request_id for member in step.members} | {leaver.request_id for leaver in step.left}
    return ids == {_PROBE_ID}


@contextlib.contextmanager
def watching(cluster: Cluster) -> Iterator[Watching]:
    """Watches from a moment on that is certain: a probe request has been seen. The cluster must be idle."""
    watcher = Watching(cluster)
    try:
        for _ in range(100):
            cluster.router.Complete(request([1], max_tokens=1, request_id=_PROBE_ID), timeout=WAIT_SECONDS)
            if watcher.wait_for_any(0.1):
                break
        yield watcher
    finally:
        watcher.close()
