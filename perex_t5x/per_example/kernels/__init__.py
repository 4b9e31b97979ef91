"""Pallas kernels that compute statistics of per-example gradients on TPUs.

The engine uses them where the program is compiled for TPUs and the kernel can take the shapes, unless `kernels=False`;
everywhere else XLA's loop for the same sum.
"""
