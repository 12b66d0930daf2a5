"""Ways to schedule, side by side: this server's own, and those it is compared with.

All share the core's queue, seats and blocks, so that what is compared differs only in the scheme.

    chairlift          as served: decoding rows first, prompts in chunks, the operator's policy and admission
    request            batch fixed until its last member has ended; rows of finished sequences are dropped
    request-padded     the same, but rows of finished sequences are still computed, as in a dense batch
    orca-max           batch re-formed at every iteration, whole prompts, room kept for the longest possible
    orca-pow2          the same, room kept for the output rounded up to a power of two
    orca-oracle        the same, room kept for exactly the output to come, which nobody knows
    prefill-first      blocks as needed; prompts that may enter come before all decoding (vLLM of 2023)
    decode-first       blocks as needed; decoding rows first, prompts in chunks of what is left (Sarathi)

The three of Orca are from the PagedAttention paper (SOSP'23, section 6.1), which gave Orca's scheduling three
ways to reserve. They reserve tokens, not runs of neighbouring slots; those that end in `-buddy` show what a
buddy allocator loses in addition.

Ways to hold KV memory, all else as in `chairlift`:

    contiguous         a run of slots for the longest that a sequence may become, by first fit
    contiguous-buddy   the same, by a buddy allocator
    paged              blocks as needed, without a prefix cache
    victims-by-order   as `chairlift`, but when blocks run out, the last to come goes first, not the cheapest
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from chairlift.lab.kv_policies import ContiguousCore, VictimsByOrderCore
from chairlift.lab.loop import Arrival
from chairlift.lab.ranges import Buddy, FirstFit, Ranges
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan
from scheduler.plan_builder import PlanBuilder
from scheduler.policy import Admission, Limits
from scheduler.sequence import Sequence

WHOLE_PROMPTS = 1 << 30  # a token budget that cuts no prompt
_CACHE_SECRET = b"laboratory"

MaxTokens = Callable[[Arrival, int], int]
"""What an arrival reserves, given the longest sequence there may be."""


class PrefillFirstCore(SchedulerCore):
    """While prompts wait for their first token, or may enter, nobody decodes.

    One difference to vLLM of 2023: a prompt that the budget cuts is not put off but goes on in the next step.
    """

    def _decode_rows(self, state: ExecutorState, builder: PlanBuilder) -> list[Sequence]:
        """No rows yet; returns those in the midst of their prompts."""
        del builder
        return [seq for seq in state.running.values() if seq.is_prefilling and _is_behind(seq)]

    def _plan(self, state: ExecutorState, builder: PlanBuilder) -> BatchPlan | None:
        """Prompts; and decoding, when there was none."""
        if not builder.rows:
            super()._decode_rows(state, builder)
        return super()._plan(state, builder)


def _is_behind(seq: Sequence) -> bool:
    return seq.num_computable_tokens > seq.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a core is made, and what clients' limits are taken to be."""

    core: Callable[..., SchedulerCore] = SchedulerCore
    batching: Batching = Batching.ITERATION
    admission: Admission | None = None  # absent, the operator's
    cuts_prompts: bool = True
    finds_prefixes: bool = True  # if the operator wants it
    watermark: float | None = None  # absent, the operator's
    max_tokens: MaxTokens | None = None
    ranges: Callable[[int], Ranges] | None = None  # where a sequence holds a run of slots

    def make(self, limits: Limits) -> SchedulerCore:
        """A core of these limits, as far as the scheme leaves them free."""
        if self.admission is not None:
            limits = replace(limits, admission=self.admission)
        if self.watermark is not None:
            limits = replace(limits, watermark=self.watermark)
        if not self.finds_prefixes:
            limits = replace(limits, prefix_caching=False)
        return self.core(limits, self.batching, cache_secret=_CACHE_SECRET)

    def arrivals(self, load: Iterable[Arrival], max_len: int) -> Iterator[Arrival]:
        """The load as this scheme sees it."""
        if self.max_tokens is None:
            yield from load
            return
        for arrival in load:
            # Clients allow what they allow under every scheme: it is cut off before room is kept for it.
            cut = replace(arrival, num_output_tokens=min(arrival.num_output_tokens, arrival.max_tokens))
            yield replace(cut, max_tokens=max(self.max_tokens(cut, max_len), cut.num_output_tokens))


def _longest(arrival: Arrival, max_len: int) -> int:
    return max(1, max_len - len(arrival.prompt_token_ids))


def _power_of_two(arrival: Arrival, max_len: int) -> int:
    return min(1 << (arrival.num_output_tokens - 1).bit_length(), _longest(arrival, max_len))


def _exactly(arrival: Arrival, _: int) -> int:
    return arrival.num_output_tokens


def _orca(max_tokens: MaxTokens) -> Scheme:
    return Scheme(admission=Admission.RESERVE, cuts_prompts=False, max_tokens=max_tokens)


def _contiguous(ranges: Callable[[int], Ranges], scheme: Scheme | None = None) -> Scheme:
    """The same in runs of slots: those keep the room, so nothing else need be asked for."""
    return replace(
        scheme or Scheme(),
        core=partial(ContiguousCore, ranges),
        ranges=ranges,
        admission=Admission.OPTIMISTIC,
        watermark=0.0,
        finds_prefixes=False,
    )


SCHEMES = {
    "chairlift": Scheme(),
    "request": Scheme(batching=Batching.REQUEST),
    "request-padded": Scheme(batching=Batching.REQUEST_PADDED),
    "orca-max": _orca(_longest),
    "orca-pow2": _orca(_power_of_two),
    "orca-oracle": _orca(_exactly),
    "prefill-first": Scheme(core=PrefillFirstCore, admission=Admission.OPTIMISTIC),
    "decode-first": Scheme(admission=Admission.OPTIMISTIC),
    "orca-max-buddy": _contiguous(Buddy, _orca(_longest)),
    "orca-pow2-buddy": _contiguous(Buddy, _orca(_power_of_two)),
    "orca-oracle-buddy": _contiguous(Buddy, _orca(_exactly)),
    "contiguous": _contiguous(FirstFit),
    "contiguous-buddy": _contiguous(Buddy),
    "paged": Scheme(finds_prefixes=False),
    "victims-by-order": Scheme(core=VictimsByOrderCore),
}
