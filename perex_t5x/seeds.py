"""Seeds that nobody chose."""

from __future__ import annotations

import secrets

from perex_t5x import distributed


def draw_seed() -> int:
    """A seed from the operating system, the same on every process."""
    return distributed.from_process_0("seed", lambda: secrets.randbits(31))
