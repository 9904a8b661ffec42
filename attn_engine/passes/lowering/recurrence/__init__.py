"""Recurrences as kernels: sweeps by chunks, steps token by token, and what belongs to both."""
