"""The laboratory: the scheduler's own core under logical time, loads, step-time models, baselines.

The one place outside `scheduler/` that imports it, and of it only what is pure: never its loop, its wire or
its servicer.
"""
