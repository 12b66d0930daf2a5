"""`chairlift watch`: follows the batch of a running router, one line for each change of its membership."""

import sys

from chairlift.about import about
from chairlift.calls import Router, add_flags, parsed, router_at, run
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.seats import Member, Seats, Step
from protos.v1 import router_pb2


def step_of(summary: router_pb2.StepSummary) -> Step:
    """The wire's message as the local type. A request's first choice goes by the request's own name."""
    members = tuple(
        Member(
            member.seq_id,
            f"{member.request_id}/{member.index}" if member.index else member.request_id,
            member.padding,
        )
        for member in summary.members
    )
    left = frozenset(leaver.seq_id for leaver in summary.left)
    return Step(summary.step_id, members, left, summary.num_dropped)


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
