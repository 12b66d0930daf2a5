"""`python -m rpc.health_probe ADDRESS [SERVICE]`: exit code 0 when it is SERVING, for container engines.

For TLS it has the same flags and environment variables as every caller.
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc import tls, unconnected
from rpc.address import Address, AddressError
from rpc.channel import connect_blocking
from rpc.errors import StartError

_TIMEOUT_SECONDS = 3
_MAX_MESSAGE_BYTES = 64 * 1024


def main(argv: list[str]) -> int:
    """Asks once; returns the exit code: 0 SERVING, 1 not, 2 a wrong address. Why not goes to stderr."""
    parser = argparse.ArgumentParser(prog="rpc.health_probe")
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("service", nargs="?", default="")
    tls.add_flags(parser)
    options = parser.parse_args(argv)
    try:
        address = Address.parse(options.address, field="ADDRESS")
        certificates = tls.from_flags(options)
    except (AddressError, StartError) as error:
        return _say(str(error), 2)
    request = health_pb2.HealthCheckRequest(service=options.service)
    with connect_blocking(address, max_message_bytes=_MAX_MESSAGE_BYTES, tls=certificates) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            details = error.details() or ""
            why = unconnected.explained(details, certificates) or details
            return _say(f"{address}: {error.code().name} {why}", 1)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return 0
    return _say(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}", 1)


def _say(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)  # noqa: T201 - what a container engine shows for a failed check
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
