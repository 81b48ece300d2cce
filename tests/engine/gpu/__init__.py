"""Tests of the GPU kernels, which run without a GPU too."""
