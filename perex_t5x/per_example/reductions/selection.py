"""Which form a producer's gradient is reduced in."""

from __future__ import annotations

import dataclasses
import math

import jax

from perex_t5x.per_example.reductions import dense, sparse, tokens
from perex_t5x.per_example.reductions.reducer import Reduced, Reducer, Site

# Tried in this order; each returns None where it does not apply.
FORMS = (dense.factored, sparse.sparse, sparse.sparse_plus_dense, dense.gram, dense.one_product_at_a_time)


def reduce_at(reducer: Reducer, site: Site) -> Reduced:
    """Reduces the gradient produced at `site`, in the first form that applies."""
    reduced = _in_first_form(reducer, site)
    if any(site.value(v)[1] for v in site.node.held):  # what it is made of are such gradients
        held = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in site.node.held) * reducer.num_examples
        return dataclasses.replace(reduced, form="kept", note=site.node.note, transient_bytes=held)
    return reduced


def _in_first_form(reducer: Reducer, site: Site) -> Reduced:
    if not any(site.batched):
        return reducer.shared(site.gradient(*site.leaves), site.initial, site.shift, site.parts)
    if reducer.unit == "token" and (reduced := tokens.per_token(reducer, site)):
        return reduced
    for form in FORMS:
        if reduced := form(reducer, site):
            return reduced
    example_size = sum(math.prod(v.aval.shape) for v, b in zip(site.node.leaves, site.batched, strict=True) if b)
    if math.prod(site.node.root.aval.shape) <= example_size:
        in_axes = tuple(0 if b else None for b in site.batched)
        g_Nx = jax.vmap(site.gradient, in_axes=in_axes)(*site.leaves)
        return reducer.all_at_once(g_Nx, "all at once", initial=site.initial, shift=site.shift)
    return reducer.one_at_a_time(site)
