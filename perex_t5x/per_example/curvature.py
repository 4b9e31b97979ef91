"""Diagonals of curvature matrices, from the squares of per-example gradients.

With f_it the model's outputs for position t of example i (one position where there is no sequence), J_it their Jacobian in
the parameters, ℓ(f, y) = −log p(y; f) the loss of one position, a_it its weight (1 unless given) and g_i the gradient of
example i's loss with its own labels:

| function | diagonal of | how |
|---|---|---|
| `empirical_fisher_diagonal` | (1/N) Σ_i g_i g_iᵀ | `mean_square` |
| `fisher_diagonal` | (1/N) Σ_i Σ_t a_it J_itᵀ F_it J_it, F = E ∇ℓ ∇ℓᵀ over y ~ p(y; f) | labels drawn from the model |
| `gauss_newton_diagonal` | (1/N) Σ_i Σ_t a_it J_itᵀ H_it J_it, H = ∇²ℓ in f | exactly, one pass for each output |

F = H for the likelihoods here, so the last two are the same matrix, one by sampling. The empirical Fisher is another: it is
no curvature far from a good fit, since it has the labels of the data and not of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.grad_statistics import grad_statistics

_FIXED = (
    "argnums",
    "batch_argnums",
    "rng_argnums",
    "has_aux",
    "group_size",
    "reduction",
    "norms",
    "clip_norm",
    "metrics",
)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """p(y; f) of one position, its outputs f on the last axis.

    Attributes:
      sample: (key, f) -> y, of p(y; f), independently for each position.
      loss: (f, y) -> −log p(y; f) up to a constant, one for each position.
      root: (f, k) -> of output number k = (position, output), a number whose gradient in f is a column of a root of H: the
        sum over k of the columns' outer products is H.

    Counts y of a Poisson distribution with the rate exp(f), whose H is diagonal, exp(f):

    >>> poisson = Likelihood(
    ...     "poisson",
    ...     sample=lambda key, f: jax.random.poisson(key, jnp.exp(f)).astype(f.dtype),
    ...     loss=lambda f, y: jnp.sum(jnp.exp(f) - y * f, axis=-1),
    ...     root=lambda f, k: jnp.exp(0.5 * jax.lax.stop_gradient(f.reshape(-1)[k])) * f.reshape(-1)[k],
    ... )
    >>> compute = gauss_newton_diagonal(lambda w, x: x @ w, poisson)
    >>> compute(jnp.zeros((2, 1)), jnp.array([[1.0, 0.0], [0.0, 3.0]]))[:, 0].tolist()
    [0.5, 4.5]
    """

    name: str
    sample: Callable[[jax.Array, jax.Array], jax.Array]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    root: Callable[[jax.Array, jax.Array], jax.Array]


def _cross_entropy(f: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(f), y[..., None], axis=-1)[..., 0]


def _categorical_root(f_TxC: jax.Array, k: jax.Array) -> jax.Array:
    # diag(p) − p pᵀ = Σ_c p_c (e_c − p)(e_c − p)ᵀ: the gradients of −log p_c, each with its probability.
    log_p = jax.nn.log_softmax(f_TxC).reshape(-1)[k]
    return jnp.exp(0.5 * jax.lax.stop_gradient(log_p)) * log_p


def _bernoulli_root(f_TxC: jax.Array, k: jax.Array) -> jax.Array:
    f = f_TxC.reshape(-1)[k]
    p = jax.nn.sigmoid(jax.lax.stop_gradient(f))
    return jnp.sqrt(p * (1.0 - p)) * f


LIKELIHOODS = {
    likelihood.name: likelihood
    for likelihood in (
        Likelihood("categorical", jax.random.categorical, _cross_entropy, _categorical_root),
        Likelihood(
            "gaussian",
            lambda key, f: f + jax.random.normal(key, f.shape, f.dtype),
            lambda f, y: 0.5 * jnp.sum(jnp.square(f - y), axis=-1),
            lambda f, k: f.reshape(-1)[k],
        ),
        Likelihood(
            "bernoulli",
            lambda key, f: jax.random.bernoulli(key, jax.nn.sigmoid(f)).astype(f.dtype),
            lambda f, y: jnp.sum(jax.nn.softplus(f) - y * f, axis=-1),
            _bernoulli_root,
        ),
    )
}


def empirical_fisher_diagonal(loss_fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """compute(params, batch, ...) -> (1/N) Σ_i g_i², elementwise: the statistic `mean_square` by its name in this trade.

    `options` are those of `grad_statistics`, and compute's arguments are its.

    >>> compute = empirical_fisher_diagonal(lambda w, x: jnp.sum((x @ w) ** 2))
    >>> compute(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]])).tolist()
    [2.0, 32.0]
    """
    statistics = grad_statistics(loss_fn, ("mean_square",), **options)
    return lambda *arguments, **keywords: statistics(*arguments, **keywords)[0].mean_square


def fisher_diagonal(
    outputs_fn: Callable[..., Any],
    likelihood: str | Likelihood = "categorical",
    *,
    num_samples: int = 1,
    has_weights: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """compute(params, batch, key, ...) -> an unbiased estimate of the diagonal of the (true) Fisher matrix.

        (1/S) Σ_s (1/N) Σ_i (∇ Σ_t √a_it ℓ(f_it, ŷ_its))²        ŷ_its ~ p(y; f_it), held constant

    whose expectation is the diagonal of (1/N) Σ_i Σ_t a_it J_itᵀ F_it J_it: labels of different positions are independent
    and the mean of ∇ℓ over them is 0, so that products of different positions vanish.

    Args:
      outputs_fn: outputs_fn(params, batch, ...) -> f [1, ..., C], of one example with its leading axis kept, positions
        before the last axis: logits, or the mean of a Gaussian of variance one.
      likelihood: 'categorical', 'gaussian', 'bernoulli' (each output by itself), or a `Likelihood`.
      num_samples: S, one pass each.
      has_weights: outputs_fn returns (f, a) with a the positions' weights [1, ...]: 0 for padding.
      options: of `grad_statistics`: microbatch_size, parameters, method, data_axes, strict, ...

    Example i's labels come from fold_in(key, i): they depend neither on microbatches nor on the mesh.

    >>> outputs = lambda w, x: x @ w
    >>> compute = fisher_diagonal(outputs, "gaussian", num_samples=64)
    >>> diagonal = compute(jnp.ones((2, 1)), jnp.array([[1.0, 0.0], [0.0, 3.0]]), jax.random.key(0))  # expected: 0.5, 4.5
    >>> bool(jnp.allclose(diagonal[:, 0], jnp.array([0.5, 4.5]), rtol=0.3))
    True
    """
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples = {num_samples!r}: must be a positive whole number.")
    known = _likelihood(likelihood)

    def loss(params: Any, batch: Any, key: jax.Array, *extra: Any, **keywords: Any) -> jax.Array:
        f, a = _outputs(outputs_fn(params, batch, *extra, **keywords), has_weights)
        labels = jax.lax.stop_gradient(known.sample(key, jax.lax.stop_gradient(f)))
        losses = known.loss(f, labels)
        return jnp.sum(losses if a is None else jnp.sqrt(a).astype(losses.dtype) * losses)

    statistics = grad_statistics(loss, ("mean_square",), rng_argnums=2, **_checked(options))

    def compute(params: Any, batch: Any, key: jax.Array, *extra: Any, **keywords: Any) -> Any:
        def one(s: Any) -> Any:
            return statistics(params, batch, jax.random.fold_in(key, s), *extra, **keywords)[0].mean_square

        return jax.tree.map(lambda x: x / num_samples, _total(one, num_samples))

    return compute


def gauss_newton_diagonal(
    outputs_fn: Callable[..., Any],
    likelihood: str | Likelihood = "categorical",
    *,
    has_weights: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """compute(params, batch, ...) -> the diagonal of (1/N) Σ_i Σ_t a_it J_itᵀ H_it J_it, the generalized Gauss–Newton.

    Exact, at the price of one pass for each output of an example (positions × C): for small models, and to see how good
    `fisher_diagonal` is. Arguments as there, without a key.

    >>> compute = gauss_newton_diagonal(lambda w, x: x @ w, "gaussian")
    >>> compute(jnp.ones((2, 1)), jnp.array([[1.0, 0.0], [0.0, 3.0]]))[:, 0].tolist()
    [0.5, 4.5]
    """
    known = _likelihood(likelihood)

    def loss(params: Any, batch: Any, k: jax.Array, *extra: Any, **keywords: Any) -> jax.Array:
        f, a = _outputs(outputs_fn(params, batch, *extra, **keywords), has_weights)
        column = known.root(f, k)
        return column if a is None else jnp.sqrt(a.reshape(-1)[k // f.shape[-1]]).astype(column.dtype) * column

    statistics = grad_statistics(loss, ("mean_square",), **_checked(options))

    def compute(params: Any, batch: Any, *extra: Any, **keywords: Any) -> Any:
        own = {k: v for k, v in keywords.items() if k not in ("weights", "first_index")}
        shape = _one_example_outputs(outputs_fn, has_weights, params, batch, extra, own)
        return _total(
            lambda k: statistics(params, batch, jnp.asarray(k), *extra, **keywords)[0].mean_square, shape.size
        )

    return compute


def _likelihood(likelihood: str | Likelihood) -> Likelihood:
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ValueError(
            f"likelihood = {likelihood!r}: must be one of {', '.join(LIKELIHOODS)}, or a curvature.Likelihood."
        )
    return LIKELIHOODS[likelihood]


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name in _FIXED:
            raise ValueError(
                f"{name} is no option of a curvature diagonal, whose arguments are (params, batch, ...) and which is a mean "
                "over single examples."
            )
    return options


def _outputs(out: Any, has_weights: bool) -> tuple[jax.Array, jax.Array | None]:
    """(outputs, weights of positions)."""
    if has_weights != isinstance(out, tuple | list) or (has_weights and len(out) != 2):
        what = "(outputs, weights)" if has_weights else "an array; if it is (outputs, weights), say has_weights=True"
        raise ValueError(f"has_weights={has_weights}: outputs_fn must return {what}.")
    f, a = out if has_weights else (out, None)
    if f.ndim < 2:
        raise ValueError(f"outputs_fn returns shape {f.shape}; it must be [1, ..., C], the outputs on the last axis.")
    if a is not None and a.shape != f.shape[:-1]:
        raise ValueError(
            f"outputs_fn returns weights of shape {a.shape}; one for each position is needed, {f.shape[:-1]}."
        )
    return f, a


def _one_example_outputs(
    outputs_fn: Callable[..., Any], has_weights: bool, params: Any, batch: Any, extra: tuple[Any, ...], keywords: Any
) -> Any:
    """Shape of the outputs of one example. Nothing is sliced: one example of a sharded batch lies on no mesh axis."""
    leaves, tree = jax.tree.flatten((params, batch, extra, keywords))
    examples = len(jax.tree.leaves(params)), len(jax.tree.leaves((params, batch)))
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | np.generic)}
    shapes = {
        i: jax.ShapeDtypeStruct((1, *x.shape[1:]) if i in range(*examples) else x.shape, x.dtype)
        for i, x in arrays.items()
    }

    def outputs(arrays: dict[int, jax.Array]) -> jax.Array:
        p, b, rest, named = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
        return _outputs(outputs_fn(p, b, *rest, **named), has_weights)[0]

    return jax.eval_shape(outputs, shapes)


def _total(one: Callable[[Any], Any], count: int) -> Any:
    """one(0) + one(1) + ..., with one sum in memory."""
    first = one(0)
    if count == 1:
        return first

    def add(total: Any, k: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(k)), None

    return jax.lax.scan(add, first, jnp.arange(1, count))[0]
