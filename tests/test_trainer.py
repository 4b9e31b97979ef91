"""The step: golden numbers, the same on every mesh and for every number of microbatches."""

import functools

import gin
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from perex_t5x import models
from perex_t5x.errors import ConfigError
from perex_t5x.gradients import split_microbatches
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.schedules import create_learning_rate_scheduler
from perex_t5x.trainer import Trainer, WeightMetricsComputer, example_keys
from tests import tiny

BATCH = 16


def make_model(*bindings, optimizer_def=None):
    tiny.configure("MODEL_DIR = 'x'", "TRAIN_STEPS = 1", *bindings)
    model = gin.get_configurable(models.DecoderOnlyModel)()
    if optimizer_def is not None:
        model.optimizer_def = optimizer_def
    return model


def make_partitioner(data, model):
    return PjitPartitioner(num_partitions=model, devices=jax.devices()[: data * model])


def run(trainer, steps, batch_size=BATCH):
    """Losses of `steps` steps on batches that differ, and the last state."""
    batches = [tiny.random_batch(batch_size, seed=i) for i in range(steps)]
    spec = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batches[0].items()}
    shapes, shardings, _ = trainer.abstract_state({k: v.shape for k, v in spec.items()})
    step_fn = trainer.compiled_step(shapes, shardings, spec)
    init = functools.partial(trainer.init_state, input_shapes={k: v.shape for k, v in spec.items()})
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    losses = []
    for batch in batches:
        placed = {k: jax.device_put(v, trainer.partitioner.data_sharding) for k, v in batch.items()}
        state, metrics = step_fn(state, placed)
        losses.append(float(metrics["objective"]))
    return np.array(losses), state, metrics


@functools.cache
def single_device_run():
    model = make_model("DROPOUT_RATE = 0.1")
    return run(Trainer(model, make_partitioner(1, 1), 0.01), 20)


def test_golden_step():
    """Literal numbers: a change of initialisation, loss, dropout keys or optimizer shows here."""
    losses, _, _ = single_device_run()
    np.testing.assert_allclose(losses[[0, 1, 19]], GOLDEN, rtol=2e-5)


GOLDEN = [6.428751, 6.453237, 5.717486]


@pytest.mark.parametrize(
    "data,model_axis", [(4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((8, 1), (2, 4)))]
)
def test_meshes_give_the_same_losses(data, model_axis):
    expected, _, _ = single_device_run()
    model = make_model("DROPOUT_RATE = 0.1")
    losses, state, _ = run(Trainer(model, make_partitioner(data, model_axis), 0.01), 20)
    np.testing.assert_allclose(losses, expected, rtol=3e-4)
    # Parameters really are spread over the model axis, and so are the optimizer's moments.
    kernel = state.params["decoder"]["layers_0"]["mlp"]["wi_0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 64 // model_axis)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert moments and all(x.sharding.is_equivalent_to(kernel.sharding, 2) for x in moments[:1])


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_microbatches_give_the_same_update(count):
    """Rows differ in their token counts, so normalising each microbatch by itself would not."""
    model = make_model("DROPOUT_RATE = 0.1", optimizer_def=optax.sgd)
    _, expected, _ = run(Trainer(model, make_partitioner(1, 1), 0.1), 2)
    _, state, _ = run(Trainer(model, make_partitioner(2, 1), 0.1, num_microbatches=count), 2)
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_normaliser_of_the_whole_batch_matters():
    """The test above can fail: the mean of the microbatches' own gradients is something else."""
    model = make_model()
    batch = tiny.random_batch(BATCH)
    shapes = {k: v.shape for k, v in batch.items()}
    params = nn.meta.unbox(jax.jit(lambda: model.get_initial_variables(jax.random.key(0), shapes)["params"])())
    loss = jax.jit(lambda batch: model.loss_fn(params, batch)[0])
    halves = split_microbatches(batch, 2)
    whole = loss(batch)
    mean = np.mean([loss(jax.tree.map(lambda x, i=i: x[i], halves)) for i in range(2)])
    assert abs(mean - whole) > 1e-4


def test_logged_rate_is_the_one_used():
    schedule = create_learning_rate_scheduler("constant * linear_warmup", 0.5, warmup_steps=4)
    trainer = Trainer(
        make_model(optimizer_def=optax.sgd), make_partitioner(1, 1), schedule, None, WeightMetricsComputer()
    )
    _, _, metrics = run(trainer, 3)
    scalars = metrics["scalars"]
    assert float(scalars["learning_rate/current"]) == pytest.approx(0.25)  # step 2 of 4
    ratio = float(scalars["weight_update_norm"] / scalars["weight_gradient_norm"])
    assert ratio == pytest.approx(0.25, rel=1e-5)


def test_built_optimizer_keeps_its_own_rate():
    own = optax.inject_hyperparams(optax.sgd)(learning_rate=0.125)
    trainer = Trainer(make_model(optimizer_def=own), make_partitioner(1, 1), 0.5, None, WeightMetricsComputer())
    _, _, metrics = run(trainer, 1)
    assert float(metrics["scalars"]["learning_rate/current"]) == pytest.approx(0.125)
    scalars = metrics["scalars"]
    ratio = float(scalars["weight_update_norm"] / scalars["weight_gradient_norm"])
    assert ratio == pytest.approx(0.125, rel=1e-5)


def test_dropout_keys_belong_to_examples():
    rng = jax.random.key_data(jax.random.key(5))
    many = jax.random.key_data(example_keys(rng, 3, 8))
    few = jax.random.key_data(example_keys(rng, 3, 4))
    np.testing.assert_array_equal(many[:4], few)
    assert len({tuple(k) for k in np.asarray(many)}) == 8
    assert (jax.random.key_data(example_keys(rng, 4, 8)) != many).any()


@pytest.mark.parametrize(
    "batch_size,microbatches,data,message",
    [
        (12, None, 8, "not divisible by the 8 data shards of the mesh. Nearest that is: 8 or 16"),
        (16, 3, 1, "not divisible by Trainer.num_microbatches = 3"),
        (16, 4, 8, "gives 4 examples in each of 4 microbatches"),
    ],
)
def test_batch_size_must_divide(batch_size, microbatches, data, message):
    trainer = Trainer(make_model(), make_partitioner(data, 1), 0.1, num_microbatches=microbatches)
    with pytest.raises(ConfigError, match=message):
        trainer.check_batch_size(batch_size)


def test_bad_optimizer_and_rate_are_named():
    with pytest.raises(ConfigError, match="OPTIMIZER = @optax.adamw"):
        Trainer(make_model(optimizer_def=0.1), make_partitioner(1, 1), 0.1)
    with pytest.raises(ConfigError, match="cannot be called with learning_rate"):
        Trainer(make_model(optimizer_def=lambda: optax.sgd(0.1)), make_partitioner(1, 1), 0.1)
    with pytest.raises(ConfigError, match="learning_rate_fn = 'fast'"):
        Trainer(make_model(), make_partitioner(1, 1), "fast")
    with pytest.raises(ConfigError, match="num_microbatches = -1"):
        Trainer(make_model(), make_partitioner(1, 1), 0.1, num_microbatches=-1)


class _Lowered:
    def __init__(self, policy, fitting):
        self.policy, self.fits = policy, policy in fitting

    def compile(self):
        if not self.fits:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.")
        return self.policy


_BOTH = ("save:context,out,mlp_in", "save:query,key,value,context,out")  # neither keeps all that the other does


@pytest.mark.parametrize(
    "fitting, cycles, chosen",
    [
        (("save:context", "full"), {"save:context": 5}, "save:context"),
        (("save_all_named", *_BOTH), {"save_all_named": 5}, "save_all_named"),
        (_BOTH, dict(zip(_BOTH, (5, 6), strict=True)), _BOTH[0]),
        (_BOTH, dict(zip(_BOTH, (6, 5), strict=True)), _BOTH[1]),
        (_BOTH, dict.fromkeys(_BOTH[:1]), _BOTH[0]),
        ((), {}, None),
    ],
    ids=["few", "most", "first", "second", "no cycles", "none"],
)
def test_remat_auto_takes_the_fastest_that_fits(fitting, cycles, chosen, monkeypatch):
    """On TPUs; here the compiler's answers are given: those in `cycles` are asked for, and no others that fit."""
    model = make_model("T5Config.remat_policy = 'auto'", optimizer_def=optax.sgd(1.0))
    trainer = Trainer(model, make_partitioner(1, 1), learning_rate_fn=lambda _: 0.1)
    assert trainer.remat_choices() == {}, "not on CPUs"
    choices = {policy: trainer.replace(model=m) for policy, m in model.remat_choices().items()}
    monkeypatch.setattr(Trainer, "remat_choices", lambda self: choices)
    monkeypatch.setattr(Trainer, "lowered_step", lambda self, *_: _Lowered(self.model.config.remat_policy, fitting))
    monkeypatch.setattr("perex_t5x.trainer._cycles", lambda compiled, device: cycles[compiled])
    seen = []
    if chosen is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            trainer.compiled_step(None, None, {})
        assert trainer.remat_choice is None
        return
    taken = trainer.compiled_step(None, None, {}, lambda lowered, compiled: seen.append((lowered.policy, compiled)))
    assert taken == chosen and trainer.remat_choice.best.policy == chosen
    assert seen[-1] == (chosen, chosen) and all(compiled is None for _, compiled in seen[:-1])
    assert trainer.remat_choice.lines()[-1] == f"remat_policy = {chosen!r} is taken"
