"""Pallas kernels that compute statistics of per-example gradients on TPUs.

With `use.ENABLED = True` the engine uses them where the program is compiled for TPUs and the kernel can take the shapes;
everywhere else, and by default, XLA's form of the same sum.
"""
