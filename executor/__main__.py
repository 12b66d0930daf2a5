"""Starts an executor: `python -m executor --model PATH --listen HOST:PORT|unix:PATH`.

If the model is shared out over several processes, this is one of its ranks: the first one serves, the others
follow it.
"""

import rpc.early_stop  # noqa: F401 # isort: skip - before the imports that take seconds

import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from executor.config import ExecutorSettings
from executor.control_groups import own_groups, processors
from executor.device import Runner
from executor.parallel.follower import follow
from executor.parallel.followers import Followers
from executor.parallel.place import Place, place_of
from executor.serving import serve
from executor.traces import StepTraces
from rpc import log, settings, tracing
from rpc.errors import StartError
from rpc.server import main

if TYPE_CHECKING:  # it imports torch
    from executor.parallel.group import Group
    from executor.parallel.ranks import Ranks
    from executor.runner import ModelRunner

PROG = "chairlift executor"


def load_runner(config: ExecutorSettings, ranks: "Ranks | None" = None) -> "ModelRunner":
    """The model on its device, or this rank's shard. Imports torch: call it after the port is open.

    Raises StartError when the model cannot be served.
    """
    import torch

    from executor.device_memory import out_of_memory
    from executor.model import ModelError
    from executor.runner import ModelRunner
    from executor.selection import accelerator_of, checked_device

    num_sharers = 1 if ranks is None else ranks.num_sharers
    num_threads = config.num_threads or min([torch.get_num_threads(), *processors(own_groups())])
    if num_sharers > 1 or num_threads != torch.get_num_threads():
        torch.set_num_threads(max(1, num_threads // num_sharers))
    try:
        return ModelRunner.load(
            config.model,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            attention=config.attention,
            memory_utilization=config.gpu_memory_utilization,
            ranks=ranks,
        )
    except ModelError as error:
        raise StartError(str(error)) from error
    except torch.OutOfMemoryError as error:
        accelerator = accelerator_of(checked_device(config.device))
        if accelerator is None:
            raise
        raise StartError(out_of_memory(accelerator.memory(), str(config.model))) from error
    except (OSError, MemoryError) as error:
        reason = str(error) or "no memory is left"
        raise StartError(f"the model {config.model} cannot be loaded: {reason}") from error


def group_of(config: ExecutorSettings, place: Place) -> "Group":
    """The ranks as a group, still to be met. Raises StartError when there is no such device."""
    from executor.model import ModelError
    from executor.parallel.group import Group
    from executor.selection import checked_device

    try:
        return Group(place, checked_device(config.device).type)
    except ModelError as error:
        raise StartError(str(error)) from error


def follow_first_rank(config: ExecutorSettings, place: Place) -> None:
    """Load this rank's shard and make steps with it. Raises StartError or RankLostError."""
    ranks = group_of(config, place)
    # Not before the first rank has found that the model can be shared out: one refusal is enough.
    ranks.meet()
    try:
        runner = load_runner(config, ranks)
        runner.follow()
        runner.close()
    finally:
        ranks.end()


async def run() -> int:
    """Reads the settings and serves, or follows the rank that does; returns the exit code."""
    config = settings.load(ExecutorSettings, sys.argv[1:], prog=PROG)
    place = place_of(config.tensor_parallel, os.environ)
    name = "executor" if place.rank == 0 else f"executor rank {place.rank}"
    log.configure(name, fmt=config.log_format, level=config.log_level)
    # Read when torch loads its OpenMP: threads that spin while they wait would take the cores from router and
    # scheduler, and from each other as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if place.rank > 0:
        return follow(place, partial(follow_first_rank, config, place))
    with tracing.opened(config, "executor") as tracer:
        return await serve_first_rank(config, place, tracer)


async def serve_first_rank(config: ExecutorSettings, place: Place, tracer: tracing.Tracer | None) -> int:
    """Serve, with the other ranks if there are any; the exit code."""
    loop = asyncio.get_running_loop()
    group: Group | None = None
    runner: ModelRunner | None = None

    async with Followers(place, sys.argv[1:]) as followers:

        def load() -> Runner:
            nonlocal group, runner
            if place.size == 1:
                return load_runner(config)
            group = group_of(config, followers.place)
            runner = load_runner(config, group)
            group.begin_pulse(lambda lost: loop.call_soon_threadsafe(followers.lose, lost))
            return runner

        code, is_device_busy = await serve(
            config,
            load,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            max_window=config.window,
            watch=followers.watch,
            traces=None if tracer is None else StepTraces(tracer, config.trace_steps),
        )
        if group is not None and not is_device_busy:
            if runner is not None:
                runner.close()
            group.end()
    return code


if __name__ == "__main__":
    main(PROG, run)
