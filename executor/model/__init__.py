"""Decoders of the Llama kind: what a checkpoint says of itself, its weights, and one pass over a mixed batch.

Everything that can be wrong with a model on disk ends in a `ModelError`.
"""

from executor.model.errors import ModelError

__all__ = ["ModelError"]
