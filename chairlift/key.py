"""`chairlift key`: makes a random API key. Its user gets the key; the file of tenants holds only its hash."""

import hashlib
import secrets

from chairlift.parser import Parser

_NUM_BYTES = 32


def main(argv: list[str]) -> int:
    """Prints one key and its hash; returns the exit code."""
    parser = Parser(
        prog="chairlift key",
        description="Makes a random API key. It is shown once: the server keeps its hash alone.",
        epilog="The hash goes into the file given by --tenants; docs/security.md shows one.",
    )
    parser.parse_args(argv)
    key = f"chairlift-{secrets.token_urlsafe(_NUM_BYTES)}"
    print(f"key   {key}")
    print(f"hash  sha256:{hashlib.sha256(key.encode()).hexdigest()}")
    return 0
