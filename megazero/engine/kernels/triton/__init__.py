"""Kernels in Triton. Each is imported at its first launch."""
