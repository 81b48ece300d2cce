"""Where these tests run the kernels: on the GPU where there is one, else interpreted on the host."""

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
