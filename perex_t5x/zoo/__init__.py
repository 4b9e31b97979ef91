"""Losses of many kinds: each is compared with a plain loop in the tests, and timed by `python -m perex_t5x.bench --zoo`.

Tiny unless asked for at the size of the benchmark. They need jax alone.

>>> from perex_t5x import per_example, zoo
>>> len(zoo.NAMES) >= 60
True
>>> case = zoo.make("weight_tanh")
>>> compute = per_example.grad_statistics(case.loss, **case.options)
>>> stats, _ = compute(case.params, case.batch, *case.extra)
>>> stats.mean["w"].shape == case.params["w"].shape
True
"""

from __future__ import annotations

import jax
import numpy as np

from perex_t5x.zoo import attention, convolutions, derivatives, embeddings, networks, objectives, recurrent, weights
from perex_t5x.zoo.case import MAKERS, Case, Draw

__all__ = [
    "NAMES",
    "Case",
    "Draw",
    "attention",
    "convolutions",
    "derivatives",
    "embeddings",
    "make",
    "networks",
    "objectives",
    "recurrent",
    "weights",
]

NAMES = tuple(MAKERS)


def make(name: str, large: bool = False) -> Case:
    """The case of this name; `large`: at the size of the benchmark."""
    maker, options = MAKERS[name]
    loss, params, batch = maker(Draw(large, np.random.default_rng(0)))
    extra = (jax.random.key(5),) if "rng_argnums" in options else ()
    return Case(name, loss, params, batch, extra, options)
