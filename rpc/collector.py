"""Python's collector, tuned so that it makes no pause that a stream would notice.

What was loaded at start stays for good, so it is frozen: no collection looks at it again. What lives for a
request is freed by reference counts, cycles are rare, so the collector need not hurry; but each look must be
short. It looks at the young after every 5,000 objects (half a millisecond); at those that outlived such a
look after 5,000,000 more, which takes a hundredth of a second for each 5,000 requests that wait then; and
at everything practically never.
"""

import gc

YOUNG, MIDDLE, OLD = 5_000, 1_000, 1_000_000


def configure() -> None:
    """Called once, when everything is loaded: freezes it, and sets the thresholds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
