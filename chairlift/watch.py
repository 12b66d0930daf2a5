"""`chairlift watch`: follows the batch of a running router, one line for each change of its membership."""

import sys

from chairlift.about import about
from chairlift.calls import Router, router_at
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.router_flags import add_flags, parsed, run
from chairlift.seats import Seats
from chairlift.summaries import step_of
from protos.v1 import router_pb2


def main(argv: list[str]) -> int:
    """Follows until Ctrl-C or until the router is gone; returns the exit code."""
    parser = Parser(prog="chairlift watch", description=about(__doc__))
    add_flags(parser)
    options, router = parsed(parser, argv)
    try:
        return run(_follow(router), router, options, parser.prog)
    except ChairliftError as error:
        print(f"chairlift watch: {error}", file=sys.stderr)
        return 1


async def _follow(router: Router) -> int:
    seats: dict[str, Seats] = {}
    async with router_at(router) as stub:
        async for summary in stub.Watch(router_pb2.WatchRequest(), metadata=router.metadata):
            of_executor = seats.setdefault(summary.executor_id, Seats(0))
            row = of_executor.take(step_of(summary))
            if row is not None:
                print(f"{summary.executor_id}  {row}", flush=True)
    return 0
