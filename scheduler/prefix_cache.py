"""Names for the content of KV blocks: equal names, equal KV. So shared prefixes are computed once.

A prefix that was computed before, or is being computed for another sequence, is not computed again.

The key of a block is a keyed 128-bit BLAKE2b hash over (key of the block before it, the block's token ids).
The chain starts from the cache salt and the model's fingerprint, so that whatever must separate users or
models separates every block behind it. The hash is cryptographic and its secret is random in each scheduler
process, so a client can neither find nor provoke a collision: a hit needs no comparison of tokens.

Only full blocks have keys, and at least one of a sequence's known tokens is always left to compute: without a
row there would be nothing to sample from. A sequence that wants log-probabilities of its prompt finds nothing
from the first wanted one on: they result from computing it. Pure: the secret comes in as an argument.
"""

from hashlib import blake2b

from scheduler.blocks import BlockManager
from scheduler.sequence import Follower, Sequence
from scheduler.token_ids import TokenIds

KEY_BYTES = 16
MAX_KEYS_AT_ONCE = 512  # about half a millisecond of hashing: longer prompts take several steps


class PrefixCache:
    """What one executor's blocks hold, and which sequence is computing what is not there yet."""

    __slots__ = (
        "_blocks",
        "_computing",
        "_fingerprint",
        "_is_on",
        "_secret",
        "num_hit_tokens",
        "num_query_tokens",
    )

    def __init__(self, blocks: BlockManager, *, secret: bytes, fingerprint: str, is_on: bool = True) -> None:
        self._blocks = blocks
        self._secret = secret
        self._fingerprint = fingerprint.encode()
        self._is_on = is_on
        self._computing: dict[bytes, Sequence] = {}  # by the key of the block that its prompt fills next
        self.num_query_tokens = 0  # prompt tokens of first admissions
        self.num_hit_tokens = 0  # the part of them that was cached

    # --- finding -----------------------------------------------------------------------------------------

    def matched(self, seq: Sequence) -> list[int] | None:
        """The longest run of cached blocks from the start of `seq`.

        None while its keys are not all made: a very long prompt is hashed in slices, one per step.
        """
        self._take_up(seq)
        found: list[int] = []
        usable = self._num_usable(seq)
        limit = len(seq.block_keys) + MAX_KEYS_AT_ONCE
        while len(found) < usable:
            if len(found) >= limit:
                return None
            self._make_keys(seq, len(found) + 1)
            block_id = self._blocks.find(seq.block_keys[len(found)])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_found(self, seq: Sequence) -> int:
        """How many tokens of `seq` are cached, as far as its names are made; makes none."""
        names = self._keys_made(seq)[: self._num_usable(seq)]
        missing = (index for index, name in enumerate(names) if self._blocks.find(name) is None)
        return next(missing, len(names)) * self._blocks.block_size

    def num_found_at_most(self, seq: Sequence) -> int:
        """Most tokens of `seq` that may be cached or in progress, judged by its first block alone.

        Without the first block there can be no others, and one name is cheap.
        """
        num_usable = self._num_usable(seq)
        if not num_usable:
            return 0
        self._take_up(seq)
        self._make_keys(seq, 1)
        first = seq.block_keys[0]
        is_there = first in self._computing or self._blocks.find(first) is not None
        return num_usable * self._blocks.block_size if is_there else 0

    def leader_of(self, seq: Sequence, num_matched: int) -> Sequence | None:
        """The sequence that is computing the block of `seq` after its first `num_matched`, or None.

        Followers get the blocks that they share with it sooner than if they computed them too, since both
        would draw on one token budget.
        """
        if not self._computing or num_matched >= seq.max_cached_tokens // self._blocks.block_size:
            return None
        self._take_up(seq)
        self._make_keys(seq, num_matched + 1)
        return self._computing.get(seq.block_keys[num_matched])

    def follow(self, seq: Sequence, leader: Sequence) -> None:
        """`seq` waits until the blocks that it shares with `leader` are there; so do its own followers."""
        size = self._blocks.block_size
        num_shared = _common_prefix(seq.token_ids, leader.token_ids)
        num_tokens = min(seq.max_cached_tokens, num_shared) // size * size
        leader.followers.append(Follower(seq, num_tokens))
        for item in seq.take_followers():
            leader.followers.append(Follower(item.seq, min(item.num_tokens, num_tokens)))

    # --- making known ------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, num_matched: int) -> list[Sequence]:
        """`seq` was admitted; its first `num_matched` blocks were found here.

        Returns the followers that need not wait any more.
        """
        self._take_up(seq)
        seq.num_registered_blocks = num_matched
        self._announce(seq)
        return self._served(seq)

    def register(self, seq: Sequence, num_computed_tokens: int) -> list[Sequence]:
        """Makes the full blocks of `seq`, whose steps have been answered, known to others.

        Returns the followers that need not wait any more.
        """
        num_full = num_computed_tokens // self._blocks.block_size
        if not self._is_on or num_full <= seq.num_registered_blocks:
            return []
        self._withdraw(seq)
        self._make_keys(seq, num_full)
        for index in range(seq.num_registered_blocks, num_full):
            self._blocks.register(seq.block_table[index], seq.block_keys[index])
        seq.num_registered_blocks = num_full
        self._announce(seq)
        return self._served(seq)

    def _served(self, seq: Sequence) -> list[Sequence]:
        """Removes and returns those of its followers whose blocks are there."""
        num_tokens = seq.num_registered_blocks * self._blocks.block_size
        served = [item.seq for item in seq.followers if item.num_tokens <= num_tokens]
        if served:
            seq.followers = [item for item in seq.followers if item.num_tokens > num_tokens]
        if seq.inherited is not None:
            served += seq.inherited.take_served(num_tokens)
            if not seq.inherited.heap:
                seq.inherited = None
        return served

    def end(self, seq: Sequence) -> None:
        """`seq` leaves. Its followers must look again (`followers`)."""
        self._withdraw(seq)
        seq.num_registered_blocks = 0

    def _announce(self, seq: Sequence) -> None:
        index = seq.num_registered_blocks
        if self._is_on and index < len(seq.token_ids) // self._blocks.block_size:
            self._make_keys(seq, index + 1)
            self._computing.setdefault(seq.block_keys[index], seq)

    def _withdraw(self, seq: Sequence) -> None:
        index = seq.num_registered_blocks
        if index < len(seq.block_keys) and self._computing.get(seq.block_keys[index]) is seq:
            del self._computing[seq.block_keys[index]]

    def _num_usable(self, seq: Sequence) -> int:
        """How many blocks of `seq` may be taken from the cache."""
        return seq.max_cached_tokens // self._blocks.block_size if self._is_on else 0

    # --- keys --------------------------------------------------------------------------------------------

    def _take_up(self, seq: Sequence) -> None:
        """Switches `seq` to keys of this block size: an executor with another one may have made some."""
        size = self._blocks.block_size
        if seq.keys_block_size == size:
            return
        if seq.block_keys:
            others = seq.other_block_keys = seq.other_block_keys or {}
            others[seq.keys_block_size], seq.block_keys = seq.block_keys, others.pop(size, [])
        seq.keys_block_size = size

    def _keys_made(self, seq: Sequence) -> list[bytes]:
        """The names made so far, for this block size."""
        size = self._blocks.block_size
        return seq.block_keys if seq.keys_block_size == size else (seq.other_block_keys or {}).get(size, [])

    def _make_keys(self, seq: Sequence, count: int) -> None:
        keys = seq.block_keys
        size = self._blocks.block_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else self._root(seq)
            block = seq.token_ids[index * size : (index + 1) * size].tobytes()
            keys.append(blake2b(parent + block, digest_size=KEY_BYTES, key=self._secret).digest())

    def _root(self, seq: Sequence) -> bytes:
        salt = seq.request.cache_salt.encode()
        body = len(salt).to_bytes(4, "little") + salt + self._fingerprint
        return blake2b(body, digest_size=KEY_BYTES, key=self._secret).digest()


def _common_prefix(one: TokenIds, other: TokenIds) -> int:
    """Length of the longest common prefix, by bisection over slices: their comparison runs in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
