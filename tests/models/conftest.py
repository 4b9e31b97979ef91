"""T5X itself, for the tests that compare with it."""

import jax
import pytest


@pytest.fixture
def t5x():
    """Its package; the test is skipped where it is not installed. It promotes ranks, which our tests forbid."""
    package = pytest.importorskip("t5x", reason="needs T5X installed, to compare with it")
    with jax.numpy_rank_promotion("allow"):
        yield package
