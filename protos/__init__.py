"""The contract: `.proto` files and the stubs generated from them.

Imports protobuf and grpc, nothing of ours. Stubs are made by `scripts/gen_protos.py`, committed, and never
edited by hand.
"""
