"""One model shared out over several processes, its ranks: each holds a part and computes with it."""
