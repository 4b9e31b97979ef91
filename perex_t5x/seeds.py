"""Seeds that nobody chose."""

from __future__ import annotations

import secrets

import jax
import numpy as np


def draw_seed() -> int:
    """A seed from the operating system, the same on every process."""
    seed = secrets.randbits(31)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        seed = int(multihost_utils.broadcast_one_to_all(np.int32(seed)))
    return seed
