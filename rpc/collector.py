"""Python's garbage collector, tuned so that it makes no pause that a stream would notice.

What was loaded at start stays for good, so it is frozen: no collection looks at it again. The objects of a
request are freed by reference counts, and cycles are rare, so the collector need not hurry; but each
collection must be short. It looks at the youngest objects after every 5,000 (half a millisecond); at those
that survived such a collection after 5,000,000 more, which takes a hundredth of a second for each 5,000
requests that wait then; and at everything practically never.
"""

import gc

YOUNG, MIDDLE, OLD = 5_000, 1_000, 1_000_000


def configure() -> None:
    """Called once, when everything is loaded: freezes it, and sets the thresholds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
