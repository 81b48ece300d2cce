"""Kernels for NVIDIA GPUs, in Triton: import this only where a GPU is to be used.

Every kernel also runs in Triton's interpreter (TRITON_INTERPRET=1, on host tensors), which is how it
is tested where there is no GPU. Launch sizes are chosen for Hopper (H100, H200: 132 processors,
228 KiB of shared memory and 65,536 registers each) and never change a result.
"""

try:
    import triton  # noqa: F401 - the one place that says what to do without it
except ImportError as missing:
    raise ImportError(
        "serving on a GPU needs Triton: pip install 'argosy[gpu]' (Linux on x86-64)"
    ) from missing
