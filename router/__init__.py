"""Clients and text: the process people talk to. It must not know blocks, batches or tensors."""
