"""What a decoder computes, one operation at a time: the door, and who stands behind it."""
