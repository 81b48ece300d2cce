"""Tests of the GPU kernels, which also run without a GPU."""
