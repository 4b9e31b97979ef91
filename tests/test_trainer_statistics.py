"""Statistics in the step: the mean is the plain gradient, nothing depends on how the batch is split, errors are named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers, per_example
from perex_t5x.errors import ConfigError
from perex_t5x.monitoring import Monitor
from perex_t5x.partitioning import PjitPartitioner, standard_logical_axis_rules
from perex_t5x.per_example.engine import jaxprs
from perex_t5x.trainer import Trainer, example_keys
from tests import tiny
from tests.trainer_support import (
    BATCH,
    assert_close,
    gradient_of,
    initial_state,
    make_model,
    make_partitioner,
    make_trainer,
    run,
    specs,
)

DROPOUT = "DROPOUT_RATE = 0.1"


@functools.cache
def expected(group_size=1):
    """(B/W) ∇ℓ_i by one `jax.grad` an example, and what follows: the definition, in NumPy."""
    model, batch = make_model(DROPOUT), tiny.random_batch(BATCH)
    trainer = Trainer(model, make_partitioner(), 0.01)
    state = initial_state(trainer, batch)
    keys = example_keys(state.rng, state.step, BATCH)
    normalizer = model.loss_normalizer(batch)

    @jax.jit
    def of_one(row, key):
        return jax.value_and_grad(model.loss_fn, has_aux=True)(state.params, row, key[None], normalizer)

    values, rows = [], []
    for i in range(BATCH):
        (loss, _), g = of_one({k: v[i : i + 1] for k, v in batch.items()}, keys[i])
        values.append(float(loss))
        rows.append(jax.tree.map(lambda x: np.float64(BATCH) * np.asarray(x, np.float64), g))
    per_example_grads = jax.tree.map(lambda *x: np.stack(x), *rows)
    groups = jax.tree.map(lambda x: x.reshape(-1, group_size, *x.shape[1:]).mean(axis=1), per_example_grads)
    return {
        "loss": np.sum(values),
        "mean": jax.tree.map(lambda x: x.mean(axis=0), groups),
        "mean_square": jax.tree.map(lambda x: (x**2).mean(axis=0), groups),
        "norms": np.sqrt(sum((x**2).reshape(len(x), -1).sum(axis=1) for x in jax.tree.leaves(groups))),
    }


def test_statistics_are_those_of_the_definition_and_the_mean_is_the_plain_gradient():
    plain = gradient_of(make_trainer(optax.adamw, DROPOUT), tiny.random_batch(BATCH))
    found = gradient_of(make_trainer(optimizers.micro_adam, DROPOUT), tiny.random_batch(BATCH))
    assert plain.statistics is None and found.statistics.mean is not None
    assert_close(found.mean, plain.mean)
    assert_close(found.mean, expected()["mean"])
    assert_close(found.statistics.mean_square, expected()["mean_square"])
    np.testing.assert_allclose(found.loss, plain.loss, rtol=1e-6)
    sums = dict(found.sums)
    assert sums.pop("non_finite_examples") == 0
    assert sums.keys() == plain.sums.keys()
    for name, value in plain.sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_microbatches": 2},
        {"num_microbatches": 4, "microbatch_size": 2},
        {"num_microbatches": 2, "mesh": (4, 2)},
        {"mesh": (8, 1), "microbatch_size": 1},
        {"num_microbatches": 2, "group_size": 2},
    ],
    ids=str,
)
def test_splitting_changes_no_number(arguments):
    """Rows differ in their tokens and their dropout: another W, another B or another key would show."""
    found = gradient_of(make_trainer(optimizers.micro_adam, DROPOUT, **arguments), tiny.random_batch(BATCH))
    wanted = expected(arguments.get("group_size", 1))
    np.testing.assert_allclose(found.loss, wanted["loss"], rtol=1e-5)
    assert_close(found.statistics.mean, wanted["mean"])
    assert_close(found.statistics.mean_square, wanted["mean_square"])
    assert found.statistics.count == BATCH


def test_a_plain_optimizer_has_the_plain_step():
    """The same program, to the letter, as a step written without any of this."""
    trainer, batch = make_trainer(optax.adamw, DROPOUT), tiny.random_batch(BATCH)
    model = trainer.model

    def reference(state, batch):
        keys = example_keys(state.rng, state.step, BATCH)
        normalizer = model.loss_normalizer(batch)
        (loss, sums), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(state.params, batch, keys, normalizer)
        updates, opt_state = optax.adamw(learning_rate=jnp.float32(0.01)).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"objective": loss, "sums": sums, "scalars": {"learning_rate/current": jnp.float32(0.01)}}
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    state = jax.eval_shape(lambda: initial_state(trainer, batch))
    ours, theirs = (str(jax.make_jaxpr(f)(state, batch)) for f in (trainer.train_step, reference))
    assert ours == theirs
    micro = make_trainer(optimizers.micro_adam, DROPOUT)
    assert str(jax.make_jaxpr(micro.train_step)(state, batch)) != ours


@pytest.mark.slow
def test_clipping_every_example_works_for_adam_too():
    clip = float(np.median(expected()["norms"]))
    trainer = make_trainer(optax.adamw, DROPOUT, clip_norm=clip)
    found = gradient_of(trainer, tiny.random_batch(BATCH))
    plain = gradient_of(make_trainer(optax.adamw, DROPOUT), tiny.random_batch(BATCH))
    assert set(found.statistics.averages) == {"mean"}
    assert 0.3 * optax.global_norm(plain.mean) < optax.global_norm(found.mean) < optax.global_norm(plain.mean)
    np.testing.assert_allclose(found.loss, plain.loss, rtol=1e-6)
    np.testing.assert_allclose(found.norms, expected()["norms"], rtol=1e-4)  # before clipping


class WithBadExamples:
    """A model whose rows that begin with token 249 have a loss that is not a number."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def loss_fn(self, params, batch, keys, normalizer):
        loss, sums = self._model.loss_fn(params, batch, keys, normalizer)
        bad = jnp.any(batch["decoder_target_tokens"][:, 0] == 249)
        return jnp.where(bad, jnp.nan, 1.0) * loss, sums


def test_examples_that_are_not_finite_are_left_out_and_counted():
    batch, rows = tiny.random_batch(BATCH), np.array([3, 8])
    batch["decoder_target_tokens"][:, 0] = 7
    without = {k: np.delete(v, rows, axis=0) for k, v in batch.items()}
    batch["decoder_target_tokens"][rows, 0] = 249
    trainer = make_trainer(optimizers.micro_adam, non_finite="skip", num_microbatches=2)
    trainer.model = WithBadExamples(trainer.model)
    found = gradient_of(trainer, batch)
    assert found.sums["non_finite_examples"] == 2 and found.sums["examples"] == BATCH - 2
    assert found.statistics.count == BATCH - 2
    # As if the missing examples were like the others: W is still the whole batch's.
    rest = gradient_of(make_trainer(optimizers.micro_adam), without)
    ratio = (without["decoder_target_tokens"] > 0).sum() / (batch["decoder_target_tokens"] > 0).sum()
    ratio *= BATCH / (BATCH - 2)
    assert_close(found.mean, jax.tree.map(lambda x: ratio * x, rest.mean))
    np.testing.assert_allclose(found.loss, ratio * rest.loss, rtol=1e-5)
    kept = make_trainer(optimizers.micro_adam)
    kept.model = WithBadExamples(kept.model)
    assert not np.isfinite(gradient_of(kept, batch).loss)  # so that the loop stops


def test_what_an_optimizer_logs_is_logged():
    _, metrics = run(make_trainer(optimizers.micro_adam_msq), 2)
    assert 0 < metrics[-1]["scalars"]["per_example/floored_share"] < 1


MEAN_ABS = per_example.Statistic("mean_abs", jnp.abs)


def mean_abs(learning_rate, statistic=MEAN_ABS):
    """An optimizer with a statistic of its own."""

    def update(statistics, state, params):
        return jax.tree.map(lambda m, a: m / (a + 1e-8), statistics.mean, statistics[statistic]), state

    made = optimizers.from_statistics("mean_abs", ("mean", statistic), lambda p: optax.EmptyState(), update)
    return optimizers.descend(made, learning_rate)


def test_an_optimizer_with_its_own_statistic():
    trainer = make_trainer(mean_abs)
    _, metrics = run(trainer, 8)
    assert metrics[-1]["objective"] < metrics[0]["objective"]
    with pytest.raises(ConfigError, match=r"needs the statistic 'mean_abs'.*per_example.Statistic\('mean_abs', ...\)"):
        by_name = make_trainer(functools.partial(mean_abs, statistic="mean_abs"))
        by_name.abstract_state({k: v.shape for k, v in tiny.random_batch(BATCH).items()})


def test_its_own_statistic_from_gin(tmp_path):
    """As a user would: a module with the optimizer, named in a Gin file."""
    (tmp_path / "own.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from tests import test_trainer_statistics as my_module\n"
        "OPTIMIZER = @my_module.mean_abs\n"
    )
    files = ("models/tiny.gin", "runs/pretrain.gin", str(tmp_path / "own.gin"))
    step, _ = tiny.train(tmp_path / "run", "TRAIN_STEPS = 2", files=files)
    assert step == 2


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"group_size": 3}, r"Trainer.group_size = 3 does not divide the 16 examples .* Nearest that does: 2"),
        ({"group_size": 16, "num_microbatches": 2}, "Trainer.group_size = 16 does not divide the 8 examples in each"),
        ({"microbatch_size": 5}, "Trainer.microbatch_size = 5 does not divide the 16 examples.* does: 4"),
        ({"microbatch_size": 2, "group_size": 4}, "Trainer.group_size = 4 does not divide Trainer.microbatch_size = 2"),
        (
            {"microbatch_size": "all"},
            "Trainer.microbatch_size = 'all': must be a whole number, at least 1, 'auto' or None",
        ),
        ({"group_size": 0}, "Trainer.group_size = 0"),
        ({"clip_norm": 0.0}, "Trainer.clip_norm = 0.0: must be a number above 0 or None"),
        ({"clip_memory": "2GB"}, "Trainer.clip_memory = '2GB': must be a number, at least 0, not a text"),
        ({"non_finite": "skipp"}, "Trainer.non_finite = 'skipp'.*Did you mean 'skip'"),
        ({"monitor": 20}, r"Trainer.monitor = 20: must be a Monitor, in Gin @...Monitor\(\)"),
        ({"transport_dtype": "int8"}, "Trainer.transport_dtype = 'int8': must be 'bfloat16' or 'float16' or None"),
        ({"unit": "tokens"}, "Trainer.unit = 'tokens': must be 'example' or 'token'. Did you mean 'token'"),
        ({"unit": "token", "group_size": 2}, "Trainer.unit = 'token' with Trainer.group_size = 2.*group_size = 1, or"),
        ({"unit": "token", "clip_norm": 1.0}, "Trainer.unit = 'token' with Trainer.clip_norm = 1.0.*clip_norm = None"),
        ({"group_size": 16}, r"BATCH_SIZE = 16 with Trainer.group_size = 16: micro_adam_var estimates the variance"),
        ({"group_size": 16, "monitor": Monitor()}, "Trainer.monitor measures the noise between examples"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_compiled(arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer = make_trainer(optimizers.micro_adam_var, **arguments)
        trainer.check_batch_size(BATCH)
        trainer.abstract_state({k: v.shape for k, v in tiny.random_batch(BATCH).items()})


def test_a_trainer_with_other_arguments():
    trainer = make_trainer(optimizers.micro_adam, clip_norm=1.0, num_microbatches=2, monitor=Monitor(), rate=0.5)
    plain = trainer.replace(optimizer_def=optax.adamw, clip_norm=None, monitor=None)
    params = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    assert plain.has_plain_gradient(params) and not trainer.has_plain_gradient(params)
    assert plain.options.num_microbatches == 2 and plain.learning_rate_fn(0) == 0.5 and plain.monitor is None
    assert trainer.model.optimizer_def is optimizers.micro_adam and trainer.options.clip_norm == 1.0
    with pytest.raises(ConfigError, match="Trainer.group_size = 0"):
        trainer.replace(group_size=0)


def test_one_example():
    """Enough for what needs no variance, refused by what does."""
    shapes = {k: v.shape for k, v in tiny.random_batch(1).items()}
    make_trainer(optimizers.micro_adam).abstract_state(shapes)
    make_trainer(optax.adamw).abstract_state(shapes)
    for optimizer in (optimizers.micro_adam_var, optimizers.micro_adam_msq):
        with pytest.raises(ConfigError, match="BATCH_SIZE = 1: micro_adam_(var|msq) estimates the variance"):
            make_trainer(optimizer).abstract_state(shapes)


@pytest.mark.parametrize("name", ["micro_adam", "micro_adam_msq", "eve", "micro_sign"])
def test_the_optimizers_state_is_sharded_like_the_parameters(name):
    trainer = make_trainer(getattr(optimizers, name), mesh=(2, 4))
    batch = tiny.random_batch(BATCH)
    shapes, shardings, _ = trainer.abstract_state({k: v.shape for k, v in batch.items()})
    wanted = shardings.params["decoder"]["layers_0"]["mlp"]["wi_0"]["kernel"]
    assert wanted.spec == jax.sharding.PartitionSpec(None, "model")
    paths = jax.tree_util.tree_leaves_with_path(shapes.opt_state)
    moments = [
        sharding
        for (path, _), sharding in zip(paths, jax.tree.leaves(shardings.opt_state), strict=True)
        if "wi_0" in jax.tree_util.keystr(path)
    ]
    assert len(moments) == {"micro_adam": 2, "micro_adam_msq": 3, "eve": 2, "micro_sign": 1}[name]
    assert all(s == wanted for s in moments)


@pytest.mark.parametrize("optimizer", [optax.adamw, optimizers.micro_adam])
def test_gradients_of_gathered_parameters_travel_narrow(optimizer):
    """With FSDP half the bytes of gradient and statistics are sent. (Traced: the CPU's compiler sends all in float32.)"""

    def sent(jaxpr):
        """(dtype, bytes) of each sum over devices that is more than a number."""
        for eqn in jaxpr.eqns:
            x = eqn.invars[0].aval if eqn.primitive.name in ("reduce_scatter", "all_to_all", "psum") else None
            if x is not None and x.ndim:
                yield str(x.dtype), x.size * x.dtype.itemsize
            for inner in jaxprs.inner(eqn):
                yield from sent(inner)

    def of_step(**arguments):
        fsdp = standard_logical_axis_rules(1, 2)
        partitioner = PjitPartitioner(num_partitions=1, devices=jax.devices()[:8], logical_axis_rules=fsdp)
        trainer = Trainer(make_model(optimizer_def=optimizer), partitioner, 0.01, **arguments)
        batch = specs(tiny.random_batch(BATCH))
        shapes, _, _ = trainer.abstract_state({k: v.shape for k, v in batch.items()})
        with partitioner.constraints():
            found = list(sent(jax.make_jaxpr(trainer.train_step)(shapes, batch).jaxpr))
        return {dtype for dtype, _ in found}, sum(size for _, size in found)

    (wide, wide_bytes), (narrow, narrow_bytes) = of_step(), of_step(transport_dtype="bfloat16")
    assert wide == {"float32"} and narrow == {"bfloat16"} and wide_bytes == 2 * narrow_bytes > 0
