"""The one way in which a model on disk is refused."""


class ModelError(ValueError):
    """The model cannot be served.

    The text is one line for people: what is wrong, where, and what would be right.
    """
