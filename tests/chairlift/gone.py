"""A standard output whose reader has gone, as behind `| true`."""

import io


class NobodyReads(io.StringIO):
    """Takes nothing."""

    def write(self, text: str) -> int:
        """As a pipe without a reader does."""
        raise BrokenPipeError(32, "Broken pipe")
