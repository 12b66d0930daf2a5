"""The whole server in one thread, under virtual time.

The pure cores of all three tiers run as they do in the servers; links between them carry the bytes of the
real messages, with delays, and break. One seed decides everything: a run that went wrong goes wrong again.

    python -m tests.simulation 4711          the whole trace of seed 4711

    world       virtual clock, events, seeded randomness, the trace
    links       streams and calls between nodes: delays, cuts
    *_node      one tier each: the duties of its shell (loop, servicer, client) around its pure core
    clients     who asks what, and whether the answer is right
    faults      what breaks, when
    scenario    all of that drawn from one seed, and the laws that must hold
"""
