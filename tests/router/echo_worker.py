"""A process that says each line again, and ends at the word "end"."""

import sys

sys.stdout.write("ready\n")
sys.stdout.flush()
for line in sys.stdin:
    if line == "end\n":
        break
    sys.stdout.write(line)
    sys.stdout.flush()
