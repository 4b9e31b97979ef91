"""The gradient of a filter as a matrix product, which CPUs are fast at.

It is a convolution whose window is as large as the image, and whose result has few positions (3 × 3). XLA's CPU compiler has
fast code for the opposite. But each position of the result is the product of a part of the image, as large as the window,
with the window; and for one example those parts, together, are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs


def bind(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    """Applies an equation of one example's gradient; in programs for CPUs, a convolution by products of windows."""
    if not is_filter_gradient(eqn):
        return jaxprs.bind(eqn, arguments)
    by_products = lambda *operands: _by_products(eqn, *operands)  # noqa: E731
    return [jax.lax.platform_dependent(*arguments, cpu=by_products, default=lambda *x: jaxprs.bind(eqn, x)[0])]


def is_filter_gradient(eqn: core.JaxprEqn) -> bool:
    """A convolution; at the end of a gradient's program it is a filter's, whatever the sizes."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    floating = all(jnp.issubdtype(jaxprs.dtype_of(v), jnp.floating) for v in (*eqn.invars, *eqn.outvars))
    is_empty = not all(jaxprs.size_of(v) for v in (*eqn.invars, *eqn.outvars))
    return floating and eqn.params["feature_group_count"] == 1 and not is_empty


def _sizes(v: Any, spec: Sequence[int]) -> list[int]:
    """Sizes along the spatial axes."""
    return [jaxprs.shape_of(v)[a] for a in spec[2:]]


def _by_products(eqn: core.JaxprEqn, image: jax.Array, window: jax.Array) -> jax.Array:
    """g[p, b, f] = Σ_kc image[p · stride + k · dilation, b, c] · window[k, c, f], p and k positions.

    (For the gradient of a filter: b its input's channels, f its output's, c the examples, of which there is one.)
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    axes, n = numbers.lhs_spec[2:], len(numbers.lhs_spec) - 2
    positions, sizes = _sizes(eqn.outvars[0], numbers.out_spec), _sizes(eqn.invars[1], numbers.rhs_spec)
    steps = list(zip(axes, positions, sizes, params["window_strides"], params["rhs_dilation"], strict=True))
    widths = [(0, 0, 0)] * image.ndim
    for axis, (low, high), dilation in zip(axes, params["padding"], params["lhs_dilation"], strict=True):
        widths[axis] = (int(low), int(high), dilation - 1)
    image = jax.lax.pad(image, jnp.zeros((), image.dtype), widths)

    def at_position(index: jax.Array) -> jax.Array:
        start, limit, strides = [jnp.int32(0)] * image.ndim, list(image.shape), [1] * image.ndim
        for axis, count, size, stride, dilation in reversed(steps):
            start[axis], index = (index % count) * stride, index // count
            limit[axis], strides[axis] = dilation * (size - 1) + 1, dilation
        cut = jax.lax.dynamic_slice(image, start, limit)
        return _contracted(eqn, jax.lax.slice(cut, [0] * image.ndim, limit, strides), window)

    # One position after another, so that one window exists at a time.
    g = jax.lax.map(at_position, jnp.arange(math.prod(positions), dtype=jnp.int32))  # [positions, b, f]
    g = g.reshape(*positions, *g.shape[1:])
    order = {numbers.out_spec[0]: n, numbers.out_spec[1]: n + 1, **{a: i for i, a in enumerate(numbers.out_spec[2:])}}
    return g.transpose([order[a] for a in range(n + 2)])


def _contracted(eqn: core.JaxprEqn, image: jax.Array, window: jax.Array) -> jax.Array:
    """[b, f]: sums over positions in a window and c, of a part of the image that is as large as the window."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    (b, c, *spatial), (f, d, *window_spatial) = numbers.lhs_spec, numbers.rhs_spec
    options = {"precision": eqn.params["precision"], "preferred_element_type": jaxprs.dtype_of(eqn.outvars[0])}
    if groups == 1:
        contracted = ((c, *spatial), (d, *window_spatial))
        return jax.lax.dot_general(image, window, (contracted, ((), ())), **options)
    # b and f in as many groups: b of one group meets f of the same one.
    image, window = image.transpose(c, *spatial, b), window.transpose(d, *window_spatial, f)
    length = math.prod(window.shape[:-1])
    image, window = image.reshape(length, groups, -1), window.reshape(length, groups, -1)
    if image.shape[-1] == window.shape[-1] == 1:  # depthwise: a sum of products, elementwise
        wide = jnp.promote_types(window.dtype, jnp.float32)
        terms = image[..., 0].astype(wide) * window[..., 0].astype(wide)
        return jnp.sum(terms, axis=0).astype(options["preferred_element_type"])[None]
    g = jax.lax.dot_general(image, window, (((0,), (0,)), ((1,), (1,))), **options)  # [groups, b, f]
    return g.transpose(1, 0, 2).reshape(g.shape[1], -1)
