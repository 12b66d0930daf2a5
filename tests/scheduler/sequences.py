"""Short ways to a sequence, for tests that need one and no core."""

from array import array

from scheduler.sequence import Event, Request, Sequence
from scheduler.tenants import Tenant, TenantLimits


def request(name: str = "r", prompt_len: int = 4, max_tokens: int = 8, **fields: object) -> Request:
    return Request(
        key=name.encode().ljust(16, b"\0"),
        request_id=name,
        prompt_token_ids=array("I", range(1, prompt_len + 1)),
        sampling=b"",
        max_tokens=max_tokens,
        **fields,  # type: ignore[arg-type]
    )


def waiting(
    name: str = "r", order: int = 1, *, output: int = 0, tenant: Tenant | None = None, **fields: object
) -> Sequence:
    """A sequence that waits, submitted with `output` ids."""
    tenant = tenant or Tenant("", TenantLimits())
    ids = array("I", range(50, 50 + output))
    return Sequence.of(request(name, **fields), tenant, ids, order)  # type: ignore[arg-type]


def running(name: str = "r", order: int = 1, *, won: int = 0, blocks: int = 0, **fields: object) -> Sequence:
    """A sequence that was admitted and has won `won` tokens since."""
    seq = waiting(name, order, **fields)  # type: ignore[arg-type]
    seq.move(Event.ADMIT)
    seq.has_started = True
    seq.num_tokens_at_admission = len(seq.token_ids)
    seq.token_ids.extend(range(won))
    seq.block_table = list(range(blocks))
    return seq
