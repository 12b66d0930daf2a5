"""Benchmarks. `python -m bench` runs them all; each writes bench/results/NAME.json."""

import os

# As the executor has it: torch's threads that wait must not keep others from the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
