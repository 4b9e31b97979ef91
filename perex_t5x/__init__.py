"""Train transformers on TPU pods with optimizers that see every example's gradient."""

__version__ = "0.1.0"
