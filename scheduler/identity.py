"""Whether two executors can stand in for each other: the same model, and where it is promised the same bits.

A sequence may be moved from one executor to another between any two tokens, so all executors of a scheduler
must mean the same by a token id and by a weight. An empty fingerprint is "not known" and fits everything.

Pure.
"""

from scheduler.plan import Capacity


def other_model(one: Capacity, other: Capacity) -> str | None:
    """What makes the model of `other` another one, as the rest of a sentence; None when nothing does."""
    for name, ours, theirs in (
        ("model fingerprint", one.model_fingerprint, other.model_fingerprint),
        ("tokenizer fingerprint", one.tokenizer_fingerprint, other.tokenizer_fingerprint),
    ):
        if ours and theirs and ours != theirs:
            return f"its {name} is {theirs}, theirs is {ours}"
    if one.vocab_size != other.vocab_size:
        return f"its vocabulary has {other.vocab_size} ids, theirs has {one.vocab_size}"
    if one.eos_token_ids != other.eos_token_ids:
        return f"its end tokens are {sorted(other.eos_token_ids)}, theirs are {sorted(one.eos_token_ids)}"
    return None


def other_numbers(one: Capacity, other: Capacity) -> str | None:
    """What makes the bits of `other` differ, though one of the two promises that bits depend on little else.

    Where neither promises anything (`row_invariant` is false), nothing can differ.
    """
    ours, theirs = one.numerics_fingerprint, other.numerics_fingerprint
    if (one.row_invariant or other.row_invariant) and ours and theirs and ours != theirs:
        return f"its numerics are {theirs}, theirs are {ours}"
    return None
