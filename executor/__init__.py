"""The executor: weights, KV tensors, sampling and the detection of ends. It knows no queue and no text."""

import rpc.quiet  # noqa: F401 - before anything of ours imports grpc
