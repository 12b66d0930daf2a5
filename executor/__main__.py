"""Starts an executor: `python -m executor --model PATH --listen HOST:PORT|unix:PATH`."""

import os
import sys
from functools import partial

from executor.config import ExecutorSettings
from executor.device import Runner
from executor.servicer import serve
from rpc import log, settings
from rpc.errors import StartError
from rpc.server import main

PROG = "chairlift executor"


def load_runner(config: ExecutorSettings) -> Runner:
    """The model on its device. Imports torch: called on the device's thread, after the port is open.

    Raises StartError when the model cannot be served.
    """
    # Read when torch loads its OpenMP: threads that spin while they wait would take the cores from router and
    # scheduler, and from each other as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    from executor.model import ModelError
    from executor.runner import ModelRunner

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    try:
        return ModelRunner.load(
            config.model,
            dtype=config.dtype,
            device=config.device,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            attention=config.attention,
            memory_utilization=config.gpu_memory_utilization,
        )
    except ModelError as error:
        raise StartError(str(error)) from error


async def run() -> int:
    """Reads the settings and serves; returns the exit code."""
    config = settings.load(ExecutorSettings, sys.argv[1:], prog=PROG)
    log.configure("executor", fmt=config.log_format, level=config.log_level)
    is_device_busy = False

    def leave_device() -> None:
        nonlocal is_device_busy
        is_device_busy = True

    code = await serve(
        config,
        partial(load_runner, config),
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        max_window=config.window,
        on_device_busy=leave_device,
    )
    if is_device_busy:
        # Python would unwind the thread from inside of torch, which ends the process with an abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    main(PROG, run)
