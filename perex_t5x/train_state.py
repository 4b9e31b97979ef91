"""`TrainState`: everything that a step reads and writes, and the random keys that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.serialization import from_state_dict, to_state_dict


class TrainState(struct.PyTreeNode):
    """Everything that a step reads and writes.

    Attributes:
      step: updates made so far.
      params: the model's parameters.
      opt_state: the optimizer's state.
      rng: the raw data of the run's base key.
      monitor: the moving averages of `monitoring.Monitor`; None without one.
    """

    step: Any
    params: Any
    opt_state: Any
    rng: Any
    monitor: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The nested dictionary that a checkpoint holds, with T5X's names."""
        state = {"step": self.step, "param_states": to_state_dict(self.opt_state)}
        if self.monitor is not None:
            state["monitor"] = self.monitor
        return {"target": to_state_dict(self.params), "state": state, "rng": self.rng}

    def from_state_dict(self, saved: Mapping[str, Any]) -> TrainState:
        """The inverse of `state_dict`, with this state's structure."""
        return TrainState(
            step=saved["state"]["step"],
            params=from_state_dict(self.params, saved["target"]),
            opt_state=from_state_dict(self.opt_state, saved["state"]["param_states"]),
            rng=saved["rng"],
            monitor=None if self.monitor is None else from_state_dict(self.monitor, saved["state"]["monitor"]),
        )


def example_keys(rng: jax.Array, step: jax.Array, batch_size: int) -> jax.Array:
    """One key per example of the global batch: fold_in(fold_in(base, step), index of the example).

    A function of the example's index in the global batch alone, so that the dropout masks do not depend on the mesh, on the
    microbatches, or on whether examples are computed one by one.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch_size, dtype=jnp.uint32))
