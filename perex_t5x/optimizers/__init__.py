"""Optimizers as optax transformations, and how a trainer drives their learning rate."""

from perex_t5x.optimizers.learning_rate import RateDriven, drive_learning_rate

__all__ = ["RateDriven", "drive_learning_rate"]
