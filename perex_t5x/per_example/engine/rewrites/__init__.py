"""Equivalent jaxprs in which gradients are produced by simpler equations."""
