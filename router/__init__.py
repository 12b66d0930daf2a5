"""Clients and text: the process people talk to. It must not know blocks, batches or tensors."""

import rpc.quiet  # noqa: F401 - before anything of ours imports grpc
