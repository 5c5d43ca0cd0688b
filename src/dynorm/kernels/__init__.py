"""Fused kernels for eager mode: Triton on a GPU, with the plain definition as their reference."""
