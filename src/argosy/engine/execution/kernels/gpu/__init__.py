"""Execution on NVIDIA GPUs, with kernels in Triton. Importing this package requires Triton.

Function `device.create_cuda_device` finds the GPU and makes a `CudaDevice`, a `GpuDevice` with what belongs
to CUDA. The device creates the operations of a model: `attention` with its kernels in `attention_kernels`, the linear
layers of `linear`, and the norms and gated activations of `elementwise`. Module `experts` computes mixtures of experts,
`delta_rule` gated delta nets. Module `logit_edits` edits logits as requests say, and `sampling` samples tokens.

Every kernel also runs in Triton's interpreter (TRITON_INTERPRET=1, on host tensors), which tests it without a GPU.
Launch sizes are chosen for Hopper (H100, H200: 132 multiprocessors with 228 KiB of shared memory and 65,536 registers
each). They never change a result.
"""

from argosy.extras import install_command

try:
    import triton
except ImportError as missing:
    raise ImportError(
        f"Triton is not installed; serving on a GPU needs it (Linux on x86-64): {install_command('gpu')}"
    ) from missing
