"""T5X's `optimizers.chain` and `MultiOptimizer`, with which Gin combines optimizers; and its names of optax's optimizers.

    OPTIMIZER = @optimizers.chain()
    optimizers.chain.transformations = [@optax.clip_by_global_norm(), @optimizers.micro_adam()]
    optax.clip_by_global_norm.max_norm = 1.0

What has no learning rate of its own is driven by the trainer's schedule, and statistics reach every part.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.optimizers.checks import Rate
from perex_t5x.optimizers.run_context import name_of


class CombinedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows whether one of its parts is driven by the learning rate it was made with."""

    uses_rate: bool = True


def _combined(made: optax.GradientTransformation, uses_rate: bool) -> CombinedTransformation:
    combined = CombinedTransformation(*optax.with_extra_args_support(made))
    combined.uses_rate = uses_rate
    return combined


def _made(part: Any, learning_rate: Any, where: str) -> tuple[Any, bool]:
    """A part as a transformation, and whether `learning_rate` is its rate."""
    if isinstance(part, optax.GradientTransformation):
        return part, getattr(part, "uses_rate", False)
    if not callable(part):
        raise ConfigError(f"{where}: {part!r} is no optax transformation. In Gin: @optax.clip(), @optax.adamw().")
    name = getattr(part, "__name__", repr(part))
    if "learning_rate" not in inspect.signature(part).parameters:
        raise ConfigError(f"{where}: @{name} takes no learning_rate, so it needs its parentheses: @{name}().")
    if learning_rate is None:
        raise ConfigError(
            f"{where}: {name} has no learning rate. Bind {name}.learning_rate, or let the trainer give it one."
        )
    made = part(learning_rate=learning_rate)
    return made, getattr(made, "uses_rate", True)


def chain(transformations: Sequence[Any], learning_rate: Rate | None = None) -> CombinedTransformation:
    """`optax.chain` of a list: one after the other.

    Args:
      transformations: optax transformations; or functions that make one from a `learning_rate`, as the trainer's schedule
        drives them (in Gin with or without parentheses). One whose own `learning_rate` is bound keeps that.
      learning_rate: of these functions.

    >>> import jax.numpy as jnp
    >>> chained = chain([optax.clip(1.0), optax.sgd], learning_rate=0.5)
    >>> print(chained.update(jnp.array([4.0]), chained.init(jnp.zeros(1)))[0], chained.uses_rate)
    [-0.5] True
    >>> chain([optax.clip(1.0), optax.sgd(0.1)], learning_rate=0.5).uses_rate
    False
    """
    if not isinstance(transformations, list | tuple) or not transformations:
        raise ConfigError(
            f"optimizers.chain.transformations = {transformations!r}: give a list, such as [@optax.clip(), @optax.adamw()]."
        )
    parts = [_made(part, learning_rate, "optimizers.chain.transformations") for part in transformations]
    return _combined(optax.chain(*(part for part, _ in parts)), any(uses for _, uses in parts))


def MultiOptimizer(  # noqa: N802 (T5X's name)
    traversals_and_optimizers: Sequence[tuple[Any, Any]], learning_rate: Rate | None = None
) -> CombinedTransformation:
    """Several optimizers, each for its own parameters (`optax.multi_transform`). What none is for is not trained.

    Args:
      traversals_and_optimizers: pairs. The first says which parameters: a regular expression, searched in names such as
        'decoder/layers_0/mlp/wi/kernel'; a function of (name, parameter); or a `flax.traverse_util.ModelParamTraversal`. The
        second is an optimizer, as in `chain`. As in T5X two for the same parameter are an error.
      learning_rate: of those that have none of their own.

    >>> import jax.numpy as jnp
    >>> params = {"norm": {"scale": jnp.ones(1)}, "mlp": {"kernel": jnp.ones(1)}, "bias": jnp.ones(1)}
    >>> multi = MultiOptimizer([("norm", optax.sgd), ("kernel$", optax.sgd(1.0))], learning_rate=0.5)
    >>> updates, _ = multi.update(params, multi.init(params))
    >>> [float(x[0]) for x in jax.tree.leaves(updates)]  # bias, mlp, norm
    [0.0, -1.0, -0.5]
    """
    where = "optimizers.MultiOptimizer.traversals_and_optimizers"
    pairs = list(traversals_and_optimizers)
    if not pairs or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise ConfigError(
            f"{where} = {pairs!r}: give pairs, such as [('norm', @optax.sgd()), ('kernel', @optax.adamw())]."
        )
    made = [_made(optimizer, learning_rate, where) for _, optimizer in pairs]
    selections = [_selection(choice, where) for choice, _ in pairs]

    def labels(params: Any) -> Any:
        chosen = [selected(params) for selected in selections]
        names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for (choice, _), found in zip(pairs, chosen, strict=True):
            if not found and isinstance(choice, str):
                raise ConfigError(
                    f"{where}: {choice!r} matches no parameter.{did_you_mean(choice, names)} There are "
                    f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
                )

        def label(path: Any, _: Any) -> str:
            numbers = [str(i) for i, found in enumerate(chosen) if name_of(path) in found]
            if len(numbers) > 1:
                raise ConfigError(
                    f"{where}: several optimizers match the parameter {name_of(path)!r} ({', '.join(numbers)})."
                )
            return numbers[0] if numbers else "none"

        return jax.tree_util.tree_map_with_path(label, params)

    transforms: dict[Hashable, Any] = {str(i): part for i, (part, _) in enumerate(made)}
    transforms["none"] = optax.set_to_zero()
    return _combined(optax.multi_transform(transforms, labels), any(uses for _, uses in made))


def _selection(choice: Any, where: str) -> Callable[[Any], set[str]]:
    """Parameters -> the names of those that are chosen."""
    if isinstance(choice, str):
        try:
            pattern = re.compile(choice)
        except re.error as e:
            raise ConfigError(f"{where}: {choice!r} is not a regular expression: {e}.") from None
        return lambda params: {name for name, _ in _named(params) if pattern.search(name)}
    if hasattr(choice, "update"):  # a traversal: it marks what it goes through

        def traversed(params: Any) -> set[str]:
            marked = choice.update(lambda leaf: _Marked(), params)
            return {name for name, leaf in _named(marked) if isinstance(leaf, _Marked)}

        return traversed
    if callable(choice):
        return lambda params: {name for name, leaf in _named(params) if choice(name, leaf)}
    raise ConfigError(f"{where}: {choice!r} is neither a regular expression nor a function nor a traversal.")


class _Marked:
    pass


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def wrap_optax_optimizer(optax_optimizer: Callable[..., optax.GradientTransformation]) -> Callable[..., Any]:
    """Of T5X, whose trainer needs its optimizers wrapped. Ours takes optax's: the same function, name and arguments.

    >>> wrap_optax_optimizer(optax.sgd).__name__
    'sgd'
    """

    @functools.wraps(optax_optimizer)
    def same(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        return optax_optimizer(*args, **kwargs)

    return same


def OptaxWrapper(optax_optimizer: optax.GradientTransformation) -> optax.GradientTransformation:  # noqa: N802 (T5X's name)
    """Of T5X, as `wrap_optax_optimizer`: the optimizer itself.

    >>> optimizer = optax.sgd(0.1)
    >>> OptaxWrapper(optimizer) is optimizer
    True
    """
    return optax_optimizer


# T5X's names. `optimizers.adam` is ours, which equals optax's; `dpsgd` is `optimizers.dp`.
adabelief = wrap_optax_optimizer(optax.adabelief)
adagrad = wrap_optax_optimizer(optax.adagrad)
adamw = wrap_optax_optimizer(optax.adamw)
fromage = wrap_optax_optimizer(optax.fromage)
lamb = wrap_optax_optimizer(optax.lamb)
lars = wrap_optax_optimizer(optax.lars)
lion = wrap_optax_optimizer(optax.lion)
noisy_sgd = wrap_optax_optimizer(optax.noisy_sgd)
radam = wrap_optax_optimizer(optax.radam)
rmsprop = wrap_optax_optimizer(optax.rmsprop)
sgd = wrap_optax_optimizer(optax.sgd)
yogi = wrap_optax_optimizer(optax.yogi)
