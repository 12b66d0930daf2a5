"""Benchmarks. `python -m bench` runs them all; each writes bench/results/NAME.json."""
