"""What whoever runs a router sees while its scheduler is away."""

from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.rig import cluster
from tests.rig.scripted_executor import Script

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_scheduler_that_restarts_does_not_make_its_routers_unready(tiny_model_folder: Path) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scripted_executor(Script())
        running.start_scheduler()
        running.start_router()
        running.wait()
        stub = health_pb2_grpc.HealthStub(running.channel("router"))
        readiness = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=60)
        serving = stub.Watch(health_pb2.HealthCheckRequest(service="chairlift.v1.Router"), timeout=60)
        assert next(readiness).status == next(serving).status == SERVING
        running.kill("scheduler")
        assert next(serving).status == NOT_SERVING
        alive = stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5)
        assert alive.status == SERVING
        running.restart("scheduler")
        assert next(serving).status == SERVING
        # The next change of readiness is the first there is: the scheduler's absence was none.
        running.process("router").terminate()
        assert next(readiness).status == NOT_SERVING
        serving.cancel()
