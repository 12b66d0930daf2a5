"""`python -m rpc.health_probe ADDRESS [SERVICE]`: exit code 0 when it is SERVING, for container engines."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.address import Address, AddressError

_TIMEOUT_SECONDS = 3


def main(argv: list[str]) -> int:
    """Asks once; returns the exit code: 0 SERVING, 1 not, 2 a wrong address. Why not goes to stderr."""
    try:
        address = Address.parse(argv[0] if argv else "", field="ADDRESS")
    except AddressError as error:
        return _say(str(error), 2)
    request = health_pb2.HealthCheckRequest(service=argv[1] if argv[1:] else "")
    with grpc.insecure_channel(address.target) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            return _say(f"{address}: {error.code().name} {error.details()}", 1)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return 0
    return _say(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}", 1)


def _say(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)  # noqa: T201 - what a container engine shows for a failed check
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
