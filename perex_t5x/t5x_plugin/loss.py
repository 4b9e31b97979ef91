"""A T5X model and a T5X mesh, as `perex_t5x.gradients` wants them.

T5X's models normalise their loss themselves, by the batch they are given. Called with one example, each would be normalised
by itself: with NUM_REAL_TARGET_TOKENS and rows of unlike length that is another function, and its mean gradient too large by
the number of examples. Here the normaliser is that of the global batch.
"""

# T5X is not in the package registry, so it is not there when types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from t5x import losses, models
from t5x.metrics import is_metric_obj
from t5x.partitioning import BasePartitioner

from perex_t5x.errors import ConfigError
from perex_t5x.partitioning import ParamShardings, PjitPartitioner
from perex_t5x.partitioning.rules import DATA_AXES, names_of

FACTOR = "_loss_normalizing_factor"  # the models' own name for it


class ExampleLoss:
    """A T5X model's loss L = (1/W) Σ_i ℓ_i of a global batch of B examples, as B ℓ_i / W of each.

    Args:
      model: a model of T5X's.
      batch_size: B.
    """

    def __init__(self, model: models.BaseModel, batch_size: int):
        self.model, self.batch_size = model, batch_size

    def loss_normalizer(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """W, as T5X computes it of this batch; 1 for a loss that has none."""
        factor, _ = losses.get_loss_normalizing_factor_and_weights(getattr(self.model, FACTOR, None), batch)
        return jnp.asarray(1.0 if factor is None else factor, jnp.float32)

    def loss_fn(
        self, params: Any, batch: Mapping[str, jax.Array], keys_1: jax.Array, share: jax.Array
    ) -> tuple[jax.Array, Any]:
        """(B ℓ/W, T5X's metrics of ℓ/W) of one example; `share` is W/B."""
        model, factor = copy.copy(self.model), getattr(self.model, FACTOR, None)
        # Of the examples' weights T5X makes others, for AVERAGE_PER_SEQUENCE; row by row, so the same here.
        _, weights = losses.get_loss_normalizing_factor_and_weights(factor, batch)
        if factor is not None:
            setattr(model, FACTOR, share * self.batch_size)
        if weights is not None:
            batch = {**batch, "decoder_loss_weights": weights}
        loss, metrics = model.loss_fn(params, batch, keys_1[0])
        return self.batch_size * loss, metrics


def check_model(model: models.BaseModel, own_loss_is_sum: bool) -> None:
    """Raises for a loss that may be something else than a sum over examples."""
    known = models.BaseTransformerModel.loss_fn
    if getattr(type(model), "loss_fn", None) is not known and not own_loss_is_sum:
        raise ConfigError(
            f"{type(model).__name__} has a loss_fn of its own, and whether its loss is a sum over examples is not known; if "
            "not, examples' gradients would silently be wrong. If for a fixed loss_normalizing_factor it is one (no mean "
            "over the batch, nothing that mixes examples), set PerExampleTrainer.own_loss_is_sum = True."
        )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raises for a metric of the whole batch that is not the sum of its examples' metrics."""
    for name, metric in metrics.items():
        if not is_metric_obj(metric):
            raise ConfigError(f"the model's metric {name!r} is a {type(metric).__name__}, not a clu.metrics.Metric.")
        with jax.ensure_compile_time_eval():
            two, three = (jax.tree.map(lambda x, n=n: jnp.full(jnp.shape(x), n), metric) for n in (2.0, 3.0))
            merged = jax.tree.leaves(two.merge(three))
            is_sum = all(bool(jnp.all(leaf == 5.0)) for leaf in merged)
        if not is_sum:
            raise ConfigError(
                f"the model's metric {name!r}, a {type(metric).__name__}, is not a sum over examples, so it cannot be "
                "computed example by example. Use one that is, such as clu.metrics.Average or t5x.metrics.Sum, or none."
            )


class DataMesh(PjitPartitioner):
    """The mesh and the rules of a T5X partitioner."""

    def __init__(self, partitioner: BasePartitioner):
        self.mesh = partitioner.mesh
        self.logical_axis_rules = tuple(getattr(partitioner, "logical_axis_rules", ()))
        for axis in names_of(partitioner.data_partition_spec[0]):
            if axis not in DATA_AXES:
                raise ConfigError(
                    f"PjitPartitioner.logical_axis_rules maps 'batch' to {axis!r}; PerExampleTrainer divides the batch over "
                    f"the mesh axes {DATA_AXES} alone."
                )

    def manual(self, transport: Any = None) -> contextlib.AbstractContextManager[Any]:
        """T5X's models name the axis of examples: where the data axes are manual, its rule has to be without them."""
        return nn.logical_axis_rules(self.automatic_rules)

    def params_shardings(self, axes: Any) -> ParamShardings:
        """From the mesh axes of T5X's `train_state_axes.params`."""
        return ParamShardings(self, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec or PartitionSpec()), axes))
