"""A tiny model, trainers of it, and what tests of the step ask of them."""

import functools

import gin
import jax
import numpy as np

from perex_t5x import models
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.trainer import Trainer
from tests import tiny

BATCH = 16


def make_model(*bindings, optimizer_def=None):
    """One layer of the tests' tiny decoder."""
    tiny.configure("MODEL_DIR = 'x'", "TRAIN_STEPS = 1", "models.T5Config.num_decoder_layers = 1", *bindings)
    model = gin.get_configurable(models.DecoderOnlyModel)()
    if optimizer_def is not None:
        model.optimizer_def = optimizer_def
    return model


def make_partitioner(data=1, model=1):
    return PjitPartitioner(num_partitions=model, devices=jax.devices()[: data * model])


def make_trainer(optimizer_def=None, *bindings, mesh=(1, 1), rate=0.01, **arguments):
    return Trainer(make_model(*bindings, optimizer_def=optimizer_def), make_partitioner(*mesh), rate, **arguments)


def specs(batch):
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}


def initial_state(trainer, batch, shardings=None):
    init = functools.partial(trainer.init_state, input_shapes={k: v.shape for k, v in batch.items()})
    return jax.jit(init, out_shardings=shardings)(jax.random.key(0))


def gradient_of(trainer, batch):
    """`Trainer.gradient` at the initial parameters."""

    def compute(state, batch):
        with trainer.partitioner.constraints():
            return trainer.gradient(state, batch)

    _, shardings, _ = trainer.abstract_state({k: v.shape for k, v in batch.items()})
    placed = {k: jax.device_put(v, trainer.partitioner.data_sharding) for k, v in batch.items()}
    return jax.jit(compute)(initial_state(trainer, batch, shardings), placed)


def run(trainer, steps, batch_size=BATCH):
    """The last state and the metrics of `steps` compiled steps on batches that differ, "measured" where it was."""
    batches = [tiny.random_batch(batch_size, seed=i) for i in range(steps)]
    shapes, shardings, _ = trainer.abstract_state({k: v.shape for k, v in batches[0].items()})
    step_fn = trainer.compiled_step(shapes, shardings, specs(batches[0]))
    monitor_fn = trainer.compiled_monitor(shapes, shardings, specs(batches[0]))
    state, metrics = initial_state(trainer, batches[0], shardings), []
    for i, batch in enumerate(batches):
        placed = {k: jax.device_put(v, trainer.partitioner.data_sharding) for k, v in batch.items()}
        due = monitor_fn is not None and trainer.monitor.is_due(i + 1)
        averages, measured = monitor_fn(state, placed) if due else (None, None)
        state, found = step_fn(state, placed)
        state = state.replace(monitor=averages) if due else state
        metrics.append(jax.device_get({**found, "measured": measured}))
    return state, metrics


def assert_close(a, b, rtol=2e-5, atol=1e-7):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = max(float(np.max(np.abs(y))), 1e-30)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=max(atol, rtol * scale), err_msg=jax.tree_util.keystr(path))


def assert_same(a, b):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
