"""Keeps gRPC from writing between the lines of our log. Import it before gRPC, which looks only once.

We log connections that come and go ourselves, in our own words. gRPC's fork handlers complain when its
threads are at work; our processes start others only by exec, which keeps nothing of gRPC.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
