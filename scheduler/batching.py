"""When the batch may change: at every iteration, or only when its last member has ended.

Iteration-level batching is what Chairlift is for. Request-level batching is here for comparison: it is what a
server does that keeps a batch fixed until its slowest member ends. It has two forms, because such servers
differ in what a finished member costs until then:

- `request`: finished rows are dropped; their seats stay empty.
- `request-padded`: finished rows go on being computed as padding, as a dense batch must.
"""

from enum import Enum


class Batching(Enum):
    """How often the batch is re-formed."""

    ITERATION = "iteration"
    REQUEST = "request"
    REQUEST_PADDED = "request-padded"

    def may_enter(self, *, num_running: int) -> bool:
        """Whether newcomers may enter a batch of `num_running` sequences while the step is planned."""
        return self is Batching.ITERATION or num_running == 0
