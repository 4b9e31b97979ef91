"""What a model has to offer: `Model` to be trained, and one small protocol for every further ability.

A model is any object with these members; it need not inherit from anything. `docs/your_own_model.md` trains two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from perex_t5x.errors import ConfigError

Batch = Mapping[str, jax.Array]
Sums = Mapping[str, jax.Array]


class Model(Protocol):
    """What training and teacher-forced evaluation ask of a model.

    Attributes:
      optimizer_def: an optax transformation, or a function of `learning_rate` that makes one; in Gin `%OPTIMIZER`.
      FEATURE_CONVERTER_CLS: the SeqIO feature converter class that makes batches from a task's features; or, since
        importing SeqIO loads TensorFlow, a method without arguments that returns it.
    """

    optimizer_def: Any
    FEATURE_CONVERTER_CLS: Any

    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """Returns {'params': tree}, initialised with the typed key `rng`; traceable.

        A leaf may be boxed with its logical axis names (`flax.linen.with_logical_partitioning`), by which it is sharded; one
        without is replicated. `input_shapes` has the shape of every feature of a batch.
        """
        ...

    def loss_normalizer(self, batch: Batch) -> jax.Array:
        """W, what the summed loss of the global batch is divided by: a float32 scalar, above 0."""
        ...

    def loss_fn(
        self, params: Any, batch: Batch, dropout_rng: jax.Array | None, normalizer: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Returns (Σ_i ℓ_i / W, sums) over the rows of `batch`, which are some or all of the global batch's.

        No row's loss may depend on another row (`per_example.check_independent` tells): rows are computed together, in
        microbatches, or one by one.

        Args:
          params: the unboxed parameters.
          batch: features, each with a leading axis of rows.
          dropout_rng: one typed key per row, [B]; None in evaluation.
          normalizer: W of the global batch.

        Returns:
          The loss, and float32 scalars that add up over rows, for the metrics: 'examples' (the number of rows that count),
          and any of the model's own. Each is logged divided by the sum of 'examples'; a model with other metrics is one
          that `SummarizesMetrics`.
        """
        ...


class SummarizesMetrics(Protocol):
    """A model with metrics of its own, instead of the sums per example.

    Attributes:
      loss_metric: which of the metrics the progress line shows as the loss.
      throughput: name -> sum: {'target_tokens': 'all_tokens'} logs 'timing/target_tokens_per_second'.
    """

    loss_metric: str
    throughput: Mapping[str, str]

    def summarize_metrics(self, sums: Mapping[str, float], objective: float) -> dict[str, float]:
        """Metrics of some steps.

        Args:
          sums: of `Model.loss_fn`, added up over the steps.
          objective: the loss L, averaged over the steps.
        """
        ...


class CountsFlops(Protocol):
    """A model that knows its FLOPs, for 'timing/model_flops_utilization'."""

    def flops_per_step(self, batch_size: int, feature_lengths: Mapping[str, int]) -> float:
        """FLOPs of one forward and backward pass over a batch: products only, nothing recomputed."""
        ...


class ShardsDimensions(Protocol):
    """A model that names the sizes that the mesh's `model` axis has to divide; they are checked before compiling."""

    def sharded_dimensions(self) -> Mapping[str, int]: ...


class DescribesComputation(Protocol):
    """A model that says in `model-info.txt` which of several ways it computes something, and why."""

    def describe_computation(self, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> str:
        """One line for the batches given; raises `ConfigError` where the configuration asks for what is not possible.

        Called inside `PjitPartitioner.manual()`, as the loss is.
        """
        ...


class Scores(Protocol):
    """A model that can score examples: `infer.mode = 'score'`, and `score_fn` metrics of SeqIO tasks."""

    def score_batch(self, params: Any, batch: Batch) -> jax.Array:
        """The log likelihood of each row's targets, [B]."""
        ...


class Predicts(Protocol):
    """A model that can predict: `infer.mode = 'predict'`, and `predict_fn` metrics of SeqIO tasks.

    Attributes:
      output_vocabulary: decodes predicted ids to text.
    """

    output_vocabulary: Any

    def predict_batch_with_aux(
        self, params: Any, batch: Batch, rng: jax.Array | None = None, **options: Any
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Returns predicted ids, [B, L], and {'scores': [B]}."""
        ...


# Further optional members: `eval_fn(params, batch)`, `loss_fn` without dropout, where that is something else; and
# `gathers_parameters = True`, where the model gathers sharded parameters itself (`perex_t5x.models.layers.parameter`).


def has(model: Any, ability: type) -> bool:
    """Whether a model has all members of a protocol."""
    return not _missing(model, ability)


def require(model: Any, ability: type, purpose: str) -> None:
    """Raises `ConfigError` unless a model has all members of a protocol.

    Args:
      purpose: what it is needed for; ends the sentence "..., which <purpose> needs".
    """
    missing = _missing(model, ability)
    if missing:
        raise ConfigError(
            f"MODEL = {type(model).__name__} has no {', '.join(missing)}, which {purpose} needs: see "
            f"perex_t5x.models.protocol.{ability.__name__} and docs/your_own_model.md."
        )


def feature_converter_cls(model: Model) -> type:
    """The model's SeqIO feature converter class, given as a class or by a method."""
    converter = model.FEATURE_CONVERTER_CLS
    return converter if isinstance(converter, type) else converter()


def sharded_dimensions(model: Any) -> Mapping[str, int]:
    """The sizes that the mesh's `model` axis has to divide; none for a model that is not one that `ShardsDimensions`."""
    return model.sharded_dimensions() if has(model, ShardsDimensions) else {}


def describe_computation(model: Any, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """See `DescribesComputation`; empty for a model that is not one."""
    return model.describe_computation(batch_spec) if has(model, DescribesComputation) else ""


def _missing(model: Any, ability: type) -> list[str]:
    # Not `isinstance` with `runtime_checkable`: it does not see members that `__getattr__` gives.
    members = {*ability.__annotations__, *vars(ability)}
    return sorted(name for name in members if not name.startswith("_") and not hasattr(model, name))
