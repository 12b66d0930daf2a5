"""The real model answers a client that was made from reflection alone, as any language could do it."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.router.real_model import REAL_MODEL, needs_real_model

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def bfloat16() -> Iterator[Cluster]:
    with cluster.running(REAL_MODEL, executor_flags=("--dtype", "bfloat16")) as running:
        yield running


class ReflectedRouter:
    """Knows the name of the service and asks the server for everything else."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        database = ProtoReflectionDescriptorDatabase(channel)
        (name,) = [name for name in database.get_services() if name.endswith(".Router")]
        self._service = DescriptorPool(database).FindServiceByName(name)

    def request(self, method: str, **fields: Any) -> Any:
        return GetMessageClass(self._service.methods_by_name[method].input_type)(**fields)

    def call(self, method: str, request: Any) -> Any:
        descriptor = self._service.methods_by_name[method]
        make = self._channel.unary_stream if descriptor.server_streaming else self._channel.unary_unary
        answer = GetMessageClass(descriptor.output_type)
        path = f"/{self._service.full_name}/{method}"
        callable_ = make(
            path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer.FromString
        )
        return callable_(request, timeout=60)


@needs_real_model
@pytest.mark.model
def test_the_capital_of_france_is_paris_at_both_doors(bfloat16: Cluster) -> None:
    router = ReflectedRouter(bfloat16.channel("router"))
    fields = {
        "chat": {"messages": [{"role": "user", "content": QUESTION}]},
        "sampling": {"temperature": 0.0, "max_tokens": 32},
    }
    whole = router.call("Complete", router.request("Complete", **fields)).choices[0]
    assert "Paris" in whole.text
    assert router.call("GetModel", router.request("GetModel")).dtype == "bfloat16"
    events = list(router.call("Generate", router.request("Generate", **fields)))
    assert "".join(event.delta.text for event in events if event.HasField("delta")) == whole.text
    assert events[-1].finished.reason == whole.finished.reason
