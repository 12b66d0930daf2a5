"""The scheduler: queue, policy, KV block state; one batch plan for each model iteration.

Runs without torch and never sees text. `core` is the place to start reading.
"""

import rpc.quiet  # noqa: F401 - before anything of ours imports grpc
