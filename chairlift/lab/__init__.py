"""The laboratory: the scheduler's own core under logical time, loads, step-time models, baselines.

The only place outside `scheduler/` that imports from it, and then only what is pure: never its loop, its wire
or its servicer.
"""
