"""Execution on CPUs, by C++ kernels for each instruction set (csrc/), and by torch where they cannot be built."""
