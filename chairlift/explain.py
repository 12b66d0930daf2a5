"""`chairlift explain ID`: shows where one request's time went, step by step, with the reasons."""

import re
import sys

import grpc
from rich.table import Table

from chairlift.about import about
from chairlift.calls import Router, router_at
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.router_flags import add_flags, parsed, run
from chairlift.tables import show
from protos.v1 import router_pb2
from rpc.cancel import heed_cancel

_BAR_CHARACTERS = 12
_OF_HTTP = re.compile("((chat)?cmpl-|resp_)(?=.)")  # before a request's id in the body of an HTTP answer


def main(argv: list[str]) -> int:
    """Asks the router and prints the time line; returns the exit code."""
    parser = Parser(prog="chairlift explain", description=about(__doc__))
    parser.add_argument("request_id", help="the id that was given with the request, or that the answer told")
    parser.add_argument(
        "--tenant", default="", help="whose request it is, for an admin's key; default: the key's own"
    )
    add_flags(parser)
    options, router = parsed(parser, argv)
    try:
        work = _ask(router, options.request_id, options.tenant)
        response = run(work, router, options, parser.prog)
    except ChairliftError as error:
        print(f"chairlift explain: {error}", file=sys.stderr)
        return 1
    show(table(response))
    return 0


async def _ask(router: Router, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
    names = [request_id]  # as given first: a client may have named its own request like that
    if prefix := _OF_HTTP.match(request_id):
        names.append(request_id[prefix.end() :])
    async with router_at(router) as stub:
        while True:
            request = router_pb2.ExplainRequest(request_id=names.pop(0), tenant=tenant)
            try:
                return await stub.Explain(request, timeout=10, metadata=router.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND or not names:
                    raise
                heed_cancel()


def table(response: router_pb2.ExplainResponse) -> Table:
    """One row a stretch, with its share of the whole drawn as a bar."""
    total = max((entry.start_seconds + entry.duration_seconds for entry in response.entries), default=0.0)
    result = Table(title=response.request_id)
    for name in ("choice", "from s", "for s", "share", "reason", "step", "detail"):
        result.add_column(name, no_wrap=name not in {"share", "detail"})
    for entry in response.entries:
        width = round(_BAR_CHARACTERS * entry.duration_seconds / total) if total else 0
        result.add_row(
            str(entry.index),
            f"{entry.start_seconds:.3f}",
            f"{entry.duration_seconds:.3f}",
            "█" * width,
            entry.reason,
            str(entry.step_id or ""),
            entry.detail,
        )
    return result
