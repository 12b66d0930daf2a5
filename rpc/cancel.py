"""Cancels that gRPC swallows.

In grpc.aio, a cancel that coincides with the end of a call becomes the call's own error: the task does not
learn of it, and a loop that calls again would never end. Such loops must heed the cancel before they go on.
"""

import asyncio


def heed_cancel() -> None:
    """Raises CancelledError when the running task was told to end and has not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
