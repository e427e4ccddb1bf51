"""The core's tests share the machine's cores among processes, so each computes on one thread."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, which takes seconds: not here
