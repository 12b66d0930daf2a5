"""A process without a free descriptor, for a while."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Nothing can be opened; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.open("/", os.O_RDONLY)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
