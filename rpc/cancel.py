"""Cancels that gRPC swallows.

A cancel that meets the end of a call in grpc.aio becomes the call's own error: the task is told nothing, and
a loop that calls again would never end. Such loops heed the cancel before they go on.
"""

import asyncio


def heed_cancel() -> None:
    """Raises CancelledError when the running task was told to end and has not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
