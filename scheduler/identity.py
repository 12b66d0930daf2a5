"""Whether two executors are interchangeable: the same model and, where that is promised, the same bits.

A sequence may be moved from one executor to another between any two tokens, so all executors of a scheduler
must agree on the meaning of each token id and on the weights. An empty fingerprint means "not known" and fits
everything.

Pure.
"""

from scheduler.plan import Capacity


def other_model(one: Capacity, other: Capacity) -> str | None:
    """How the model of `other` differs, as the rest of a sentence; None if it does not."""
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
    """How the numerics of `other` differ, though one of the two promises bits that depend on little else.

    If neither promises anything (`row_invariant` is false), they count as equal. None when they do.
    """
    ours, theirs = one.numerics_fingerprint, other.numerics_fingerprint
    if (one.row_invariant or other.row_invariant) and ours and theirs and ours != theirs:
        return f"its numerics are {theirs}, theirs are {ours}"
    return None
