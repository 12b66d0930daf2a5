"""What a decoder computes, one operation at a time: the interface and its implementations."""
