"""Runs of tiny models on the meshes of the table, in double precision: what one device computes, and what eight do."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from perex_t5x import models, optimizers
from perex_t5x.monitoring import Monitor
from perex_t5x.partitioning import PjitPartitioner, standard_logical_axis_rules
from perex_t5x.trainer import Trainer, TrainState
from tests import tiny
from tests.test_trainer_statistics import WithBadExamples

BATCH, STEPS = 16, 10
# (replica, data, model), and whether parameters are sharded over `data`.
MESHES = {
    "one": ((1, 1, 1), False),
    "dp 8": ((1, 8, 1), False),
    "fsdp 8": ((1, 8, 1), True),
    "tp 8": ((1, 1, 8), False),
    "fsdp 4 x tp 2": ((1, 4, 2), True),
    "replica 2 x fsdp 2 x tp 2": ((2, 2, 2), True),
}
OPTIMIZERS = {
    "adamw": optax.adamw,
    "micro_adam": optimizers.micro_adam,
    "micro_adam_msq": optimizers.micro_adam_msq,
    "sign_ema": optimizers.sign_ema,
    "sgd": optax.sgd,
}
STATISTICS = ("mean", "mean_square", "mean_sign")


def make_partitioner(mesh: str) -> PjitPartitioner:
    """`mesh` is a name of `MESHES`, or one with ' in stages': reduce-scatters as on a torus of 2 x 4 devices."""
    shape, fsdp = MESHES[mesh.removesuffix(" in stages")]
    partitioner = PjitPartitioner(
        ici_mesh_shape=shape,
        devices=jax.devices()[: int(np.prod(shape))],
        logical_axis_rules=standard_logical_axis_rules(1, 2 if fsdp else 1),
    )
    if mesh.endswith(" in stages"):
        partitioner.scatter_stages = {"data": (2, 4)}
    return partitioner


# --- models -----------------------------------------------------------------------------------------------------------


class InDouble:
    """A model whose parameters start, and so stay, in float64."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_initial_variables(self, *arguments: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float64), self._model.get_initial_variables(*arguments))


class OwnNetwork(nn.Module):
    """A user's network: it knows logical axes, but nothing of gathering. One parameter has no names, one no even parts."""

    config: models.T5Config

    @nn.compact
    def __call__(self, decoder_input_tokens: jax.Array, dropout_keys_B: Any = None, **unused: Any) -> jax.Array:
        cfg = self.config

        def parameter(name: str, axes: tuple[str, ...], *shape: int) -> jax.Array:
            init = nn.with_logical_partitioning(nn.initializers.normal(0.3), axes)
            return self.param(name, init, shape).astype(cfg.compute_dtype)

        x_BxTxD = parameter("embedding", ("vocab", "embed"), cfg.vocab_size, cfg.emb_dim)[decoder_input_tokens]
        x_BxTxD = jnp.cumsum(x_BxTxD, axis=1) / (1 + jnp.arange(x_BxTxD.shape[1]))[None, :, None]
        wi, wo = parameter("wi", ("embed", "mlp"), cfg.emb_dim, 20), parameter("wo", ("mlp", "embed"), 20, cfg.emb_dim)
        odd = parameter("odd", ("mlp", "embed"), 20, 3)
        bias = self.param("bias", nn.initializers.zeros, (20,)).astype(cfg.compute_dtype)
        h_BxTxF = jnp.tanh(x_BxTxD @ wi + bias[None, None])
        scale_BxT = 1 + jnp.sum(h_BxTxF @ odd, axis=-1)
        x_BxTxD += scale_BxT[:, :, None] * (h_BxTxF @ wo)
        return x_BxTxD @ parameter("logits", ("embed", "vocab"), cfg.emb_dim, cfg.vocab_size)


def make_model(row: Row) -> Any:
    """Two layers of width 16 with 8 heads of 4: whatever is sharded divides by 8."""
    config = models.T5Config(
        **dict(
            vocab_size=384,
            dtype="float64",
            emb_dim=16,
            num_heads=8,
            head_dim=4,
            mlp_dim=32,
            num_encoder_layers=2,
            num_decoder_layers=2,
            mlp_activations=("silu", "linear"),
            scan_layers=True,
            remat_policy="full",
        )
        | dict(row.sizes)
    )
    vocabulary, optimizer = SimpleNamespace(eos_id=1), OPTIMIZERS[row.optimizer]
    loss = {"loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS", "z_loss": 1e-4}
    if row.kind == "encoder_decoder":
        model = models.EncoderDecoderModel(models.Transformer(config), vocabulary, vocabulary, optimizer, **loss)
    else:
        network = {"decoder": models.DecoderWrapper, "own": OwnNetwork}[row.kind](config)
        model = models.DecoderOnlyModel(network, vocabulary, optimizer, **loss)
    model = InDouble(model) if row.is_double else model
    return model if row.bad is None else WithBadExamples(model)


def make_batch(row: Row, step: int) -> dict[str, np.ndarray]:
    """16 rows of 2 to 16 tokens; the encoder's inputs have lengths of their own."""
    batch = tiny.random_batch(BATCH, seed=step)
    if row.bad is not None:
        batch["decoder_target_tokens"][:, 0] = 7
        if row.bad[0] == step:
            batch["decoder_target_tokens"][row.bad[1], 0] = 249
    if row.kind != "encoder_decoder":
        return batch
    names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    inputs = tiny.random_batch(BATCH, length=12, seed=100 + step)["decoder_target_tokens"]
    return {"encoder_input_tokens": inputs, **{name: batch[name] for name in names}}


# --- runs -------------------------------------------------------------------------------------------------------------


class Everything(Monitor):
    """A monitor that hands out all statistics, and the norms in the order of the batch."""

    statistics = STATISTICS

    def init(self, params: Any) -> Any:
        return {}

    def measured(self, state: Any, found: Any) -> Any:
        return state, {"statistics": found.statistics.averages, "norms": found.norms, "loss": found.loss}


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of the table. Rows that differ in `mesh` alone must give the same numbers.

    Attributes:
      kind: 'decoder', 'encoder_decoder' or 'own', a network that does not gather its parameters.
      sizes: changes of `T5Config`.
      arguments: of the trainer.
      bad: (step, example) whose loss is not a number.
    """

    mesh: str
    optimizer: str = "micro_adam"
    kind: str = "decoder"
    sizes: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    bad: tuple[int, int] | None = None

    @property
    def is_double(self) -> bool:
        return dict(self.sizes).get("dtype", "float64") == "float64"


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run: losses and sums of all steps; the last state, and its parameters; the last batch."""

    losses: np.ndarray
    sums: dict[str, Any]
    params: Any
    state: TrainState  # on the devices, like the batch
    batch: Any


@functools.cache
def run(row: Row) -> Ran:
    """Ten compiled steps on batches that differ."""
    with jax.enable_x64(row.is_double):
        trainer = Trainer(make_model(row), make_partitioner(row.mesh), 0.01, **dict(row.arguments))
        batches = [make_batch(row, step) for step in range(STEPS)]
        shapes, shardings, _ = trainer.abstract_state(shapes_of(batches[0]))
        step_fn = trainer.compiled_step(shapes, shardings, specs_of(batches[0]))
        state = jax.device_put(initial_state(trainer, row), shardings)
        found = []
        for batch in batches:
            placed = jax.device_put(batch, trainer.partitioner.data_sharding)
            state, metrics = step_fn(state, placed)
            found.append(jax.device_get(metrics))
        return Ran(
            losses=np.array([m["objective"] for m in found]),
            sums=jax.tree.map(lambda *x: np.array(x), *(m["sums"] for m in found)),
            params=jax.device_get(state.params),
            state=state,
            batch=placed,
        )


def shapes_of(batch: Any) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in batch.items()}


def specs_of(batch: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def initial_state(trainer: Trainer, row: Row) -> TrainState:
    """That of `Trainer.init_state`, but the parameters of all rows of a model are drawn once: it saves a compilation."""
    params, rng = _drawn(row.kind, row.sizes)
    return TrainState(np.zeros((), np.int32), params, trainer.optimizer.init(params), rng)


@functools.cache
def _drawn(kind: str, sizes: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    row = Row("one", kind=kind, sizes=sizes)
    trainer = Trainer(make_model(row), make_partitioner("one"), 0.01)
    init = functools.partial(trainer.init_state, input_shapes=shapes_of(make_batch(row, 0)))
    state = jax.jit(init)(jax.random.key(0))
    return jax.device_get((state.params, state.rng))


@functools.cache
def measured(row: Row) -> dict[str, Any]:
    """'loss', 'statistics' and 'norms' of the last batch at the last state, by the trainer's monitor."""
    ran = run(row)
    with jax.enable_x64(row.is_double):
        monitor_fn = _compiled_monitor(row.mesh, row.kind, row.sizes)
        state = ran.state.replace(opt_state=optax.sgd(0.0).init(None), monitor={})
        return jax.device_get(monitor_fn(state, ran.batch)[1])


@functools.cache
def _compiled_monitor(mesh: str, kind: str, sizes: Any) -> Any:
    """One for all optimizers."""
    row = Row(mesh, "sgd", kind, sizes)
    trainer = Trainer(make_model(row), make_partitioner(mesh), 0.01, monitor=Everything())
    batch = make_batch(row, 0)
    shapes, shardings, _ = trainer.abstract_state(shapes_of(batch))
    return trainer.compiled_monitor(shapes, shardings, specs_of(batch))


# --- comparison -------------------------------------------------------------------------------------------------------


def assert_equal(found: Ran, wanted: Ran, rtol: float) -> None:
    """Losses, sums and parameters of two runs, relative to the largest of each array."""
    assert_close(found.losses, wanted.losses, rtol, "losses")
    assert_close(found.params, wanted.params, rtol, "parameters")
    for name, value in wanted.sums.items():  # float32, whatever the model computes in
        assert_close(found.sums[name], value, max(rtol, 1e-6), name)


def assert_close(a: Any, b: Any, rtol: float, name: str = "") -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        scale = max(float(np.max(np.abs(y))), 1e-30)
        np.testing.assert_allclose(
            x / scale, y / scale, rtol=0, atol=rtol, err_msg=f"{name}{jax.tree_util.keystr(path)}"
        )
