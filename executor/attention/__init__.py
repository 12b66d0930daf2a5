"""Attention over the paged KV cache: one interface, its back ends, and the choice between them."""
