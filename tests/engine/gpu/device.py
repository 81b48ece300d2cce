"""Device of the kernel tests: a GPU if one is visible, else the host with interpreted kernels."""

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
