"""The process that clients talk to. It handles text, and must not know blocks, batches or tensors."""

import rpc.quiet  # noqa: F401 - before anything of ours imports grpc
