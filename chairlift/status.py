"""`chairlift status`: shows the state of a running server by tier: health, versions, executors, load."""

import sys

from rich.table import Table
from rich.text import Text

from chairlift.about import about
from chairlift.calls import Router, router_at
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.router_flags import add_flags, parsed, run
from chairlift.tables import show
from protos.v1 import router_pb2


def main(argv: list[str]) -> int:
    """Asks the router and prints what it knows; returns 0 when requests are served, else 1."""
    parser = Parser(
        prog="chairlift status",
        description=f"{about(__doc__)} Exit code 1 when no requests are served.",
    )
    add_flags(parser)
    options, router = parsed(parser, argv)
    try:
        status = run(_ask(router), router, options, parser.prog)
    except ChairliftError as error:
        print(f"chairlift status: {error}", file=sys.stderr)
        return 1
    show(table(status, str(router.address)))
    return 1 if status.refusal else 0


async def _ask(router: Router) -> router_pb2.GetStatusResponse:
    async with router_at(router) as stub:
        return await stub.GetStatus(router_pb2.GetStatusRequest(), timeout=10, metadata=router.metadata)


def table(status: router_pb2.GetStatusResponse, address: str) -> Table:
    """One row a process: the router, below it its schedulers, below each of them its executors."""
    result = Table()
    result.add_column("process", overflow="fold")  # an address is of use only when it is whole
    for name in ("state", "version", "running", "waiting", "KV blocks", "last step"):
        result.add_column(name)
    _add(
        result,
        f"router {address}",
        status.refusal or f"serving {status.model}",
        status.version,
        running=f"{status.num_requests} requests",
    )
    for scheduler in status.schedulers:
        answers = bool(scheduler.scheduler_id)
        _add(
            result,
            f"  scheduler {scheduler.address}",
            scheduler.refusal or f"serving, term {scheduler.term}",
            scheduler.version,
            running=str(scheduler.num_running) if answers else "",
            waiting=str(scheduler.num_waiting) if answers else "",
        )
        for executor in scheduler.executors:
            _add_executor(result, executor)
    return result


def _add_executor(result: Table, executor: router_pb2.ExecutorStatus) -> None:
    name = f"    executor {executor.executor_id}"
    if executor.missing:
        _add(result, name, executor.missing, "")
        return
    num_taken = executor.num_blocks - executor.num_free_blocks
    _add(
        result,
        name,
        "draining" if executor.draining else "attached",
        executor.version,
        running=f"{executor.num_running} of {executor.max_num_seqs}",
        blocks=f"{num_taken} of {executor.num_blocks}",
        step=f"{executor.previous_step_us / 1000:.1f} ms" if executor.previous_step_us else "",
    )


def _add(
    result: Table,
    name: str,
    state: str,
    version: str,
    *,
    running: str = "",
    waiting: str = "",
    blocks: str = "",
    step: str = "",
) -> None:
    """Adds a row of plain texts: what processes say of themselves is no markup."""
    result.add_row(*map(Text, (name, state, version, running, waiting, blocks, step)))
