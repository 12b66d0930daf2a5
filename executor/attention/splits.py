"""Into how many parts the contexts of a decode step are cut, so that even a few long ones fill a whole GPU.

This depends on the number of rows, and on nothing that can differ between two steps with the same number of
rows: so a captured step is cut exactly like the same step without capturing.
"""

from typing import Final

WANTED_PARTS: Final = 528
"""Four for each of an H100's or H200's 132 multiprocessors."""
MOST_SPLITS: Final = 16


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Parts of each row's context: a power of two."""
    splits = 1
    while 2 * splits <= MOST_SPLITS and num_rows * num_kv_heads * splits < WANTED_PARTS:
        splits *= 2
    return splits


def num_whole_rows(num_kv_heads: int) -> int:
    """The fewest rows whose contexts are not cut."""
    return -(-WANTED_PARTS // num_kv_heads)
