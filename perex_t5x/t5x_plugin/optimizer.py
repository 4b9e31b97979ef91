"""optax transformations, ours and any other, as what T5X calls an `optimizer_def`.

T5X's own wrapper of optax passes an update nothing but the gradient, and has a list of the states it can shard. Here a
state is sharded by its leaves' names and shapes, and a checkpoint has them by name, as T5X's wrapper names them: what that
wrote is read here.
"""

# T5X is not in the package registry, so it is not there when types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.serialization import from_state_dict, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec
from jax.tree_util import keystr
from t5x.optimizers import Optimizer, OptimizerDef, OptimizerState

from perex_t5x import optimizers
from perex_t5x.errors import ConfigError
from perex_t5x.partitioning import like_params
from perex_t5x.per_example import GradStatistics


@struct.dataclass
class HyperParams:
    """What T5X's trainers set at every step."""

    learning_rate: Any = None


class PerExampleOptimizer(OptimizerDef):
    """An `optimizer_def` for T5X's models.

    Args:
      optimizer: a function with a `learning_rate` argument that returns an optax transformation, such as
        `optimizers.micro_adam` or `optax.lion`: T5X's `Trainer.learning_rate_fn` then gives the rate; or a transformation
        that is already built and has its own.

    >>> PerExampleOptimizer(optax.lion).uses_rate, PerExampleOptimizer(optax.lion(1e-3)).uses_rate
    (True, False)
    """

    def __init__(self, optimizer: Callable[..., optax.GradientTransformation] | optax.GradientTransformation):
        self.optimizer = optimizer
        self._driven = optimizers.drive_learning_rate(optimizer)
        super().__init__(hyper_params=HyperParams())

    @property
    def uses_rate(self) -> bool:
        """Whether the trainer's learning rate is the one used."""
        return self._driven.uses_rate

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), self._driven.init(params))

    def apply_gradient(
        self, hyper_params: HyperParams, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """`grads` is the gradient, or the statistics of the examples' gradients that it is the mean of."""
        statistics = grads if isinstance(grads, GradStatistics) else None
        mean = grads if statistics is None else statistics.mean
        rate = hyper_params.learning_rate
        updates, param_states = self._driven.update(mean, state.param_states, params, rate, statistics=statistics)
        return optax.apply_updates(params, updates), OptimizerState(state.step + 1, param_states)

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        """The optimizer with the names of each leaf's axes: a parameter's for what is like it, else none."""
        axes = like_params(optimizer.state.param_states, param_logical_axes, optimizer.target, default=PartitionSpec())
        return Optimizer(self, OptimizerState(None, axes), param_logical_axes)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """For T5X's checkpoints. A state without arrays has no entry: they do not know empty dictionaries."""
        nested = unflatten_dict(_by_name(state.param_states), sep="/")
        own = {"step": state.step, "param_states": nested} if nested else {"step": state.step}
        return {"target": to_state_dict(target), "state": own}

    def restore_state(
        self, opt_target: Any, opt_state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """The inverse of `state_dict`, with the structure of `opt_state`."""
        saved = flatten_dict(dict(state_dict["state"]).get("param_states", {}), sep="/")
        names = list(_by_name(opt_state.param_states))
        missing, unknown = set(names) - set(saved), set(saved) - set(names)
        if missing or unknown:
            raise ConfigError(
                "the optimizer's state does not fit the checkpoint's: "
                + "; ".join(
                    f"{kind}: {', '.join(sorted(leaves)[:4])}{', ...' if len(leaves) > 4 else ''}"
                    for kind, leaves in (("missing there", missing), ("only there", unknown))
                    if leaves
                )
                + ". To begin with a fresh state: RestoreCheckpointConfig.assignment_map = [('.*param_states.*', None)] and "
                "fallback_to_scratch = True."
            )
        param_states = jax.tree.unflatten(jax.tree.structure(opt_state.param_states), [saved[name] for name in names])
        target = from_state_dict(opt_target, state_dict["target"])
        return target, OptimizerState(state_dict["state"]["step"], param_states)


def _by_name(tree: Any) -> dict[str, Any]:
    """Name -> leaf, '0/mu/decoder/mlp/wi/kernel', in the order of `jax.tree.leaves`."""
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _for_t5x(make: Callable[..., optax.GradientTransformation]) -> Callable[..., PerExampleOptimizer]:
    """The optimizer's function as one that returns an `optimizer_def`; with a `learning_rate` it keeps that."""

    @functools.wraps(make)
    def made(**arguments: Any) -> PerExampleOptimizer:
        if "learning_rate" in arguments:
            return PerExampleOptimizer(make(**arguments))
        return PerExampleOptimizer(functools.partial(make, **arguments))

    return made


adam = _for_t5x(optimizers.adam)
eve = _for_t5x(optimizers.eve)
micro_adam = _for_t5x(optimizers.micro_adam)
micro_adam_msq = _for_t5x(optimizers.micro_adam_msq)
micro_adam_var = _for_t5x(optimizers.micro_adam_var)
micro_clip = _for_t5x(optimizers.micro_clip)
micro_lion = _for_t5x(optimizers.micro_lion)
micro_sign = _for_t5x(optimizers.micro_sign)
sign_ema = _for_t5x(optimizers.sign_ema)
sign_sgd = _for_t5x(optimizers.sign_sgd)
