"""The scheduler: queue, policy and KV block state; makes one batch plan per model iteration.

Runs without torch and never sees text. Start reading at `core`.
"""

import rpc.quiet  # noqa: F401 - before anything of ours imports grpc
