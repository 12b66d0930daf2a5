"""A process without a free descriptor, for a while."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Nothing can be opened; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
