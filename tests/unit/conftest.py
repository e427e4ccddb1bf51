"""The core's tests share the machine's cores among processes, so each computes on one thread."""

import torch

torch.set_num_threads(1)
