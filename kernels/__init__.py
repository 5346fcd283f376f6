"""Triton kernels, installed as ring_reduce.kernels: each jit kernel together with its launcher."""
