"""Type of a token log: a compact array of unsigned 32-bit ids, four bytes a token."""

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:  # Python 3.11 cannot subscript it at run time
    TokenIds = array

NO_IDS: TokenIds = array("I")
