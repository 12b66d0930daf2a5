"""A process that says each line again, and ends at the word "end"."""

import sys

for line in sys.stdin:
    if line == "end\n":
        break
    sys.stdout.write(line)
    sys.stdout.flush()
