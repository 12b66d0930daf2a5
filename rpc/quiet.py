"""Keeps gRPC from writing between the lines of our log; to be imported before it, for it looks once.

Its news of connections that come and go is ours to tell, in our words. Its handlers for forks find its
threads at work and say so; processes of ours start others by exec alone, and keep nothing of gRPC then.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
