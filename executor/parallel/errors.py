"""What can go wrong between ranks."""


class RankLostError(Exception):
    """The ranks do not answer each other any more: no step can be made, by any of them."""
