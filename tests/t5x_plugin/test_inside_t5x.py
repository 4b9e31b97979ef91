"""T5X's own example models, mesh, optimizers and checkpoints, with our trainer. Needs T5X, which is in no registry."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip(
    "t5x", reason="needs T5X (github.com/google-research/t5x), which is in no registry; see docs/inside_t5x.md"
)

import clu.metrics
import t5x.adafactor
import t5x.losses
import t5x.models
import t5x.optimizers
import t5x.trainer
from t5x import utils

from perex_t5x import optimizers, t5x_plugin
from perex_t5x.errors import ConfigError
from tests.t5x_plugin import small_t5x

STEPS = 20


@pytest.fixture(autouse=True)
def _t5x_broadcasts_ranks():
    """T5X's models do, silently."""
    with jax.numpy_rank_promotion("allow"):
        yield


def rate(step):
    return 0.01 / (1.0 + 0.1 * step)


def adafactor():
    rules = t5x.adafactor.standard_logical_factor_rules()
    return t5x.adafactor.Adafactor(decay_rate=0.8, step_offset=0, logical_factor_rules=rules)


NORMALIZED = {"loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS", "z_loss": 1e-3, "label_smoothing": 0.1}
OPTIMIZERS = {
    "adamw": (lambda: t5x.optimizers.adamw(rate), lambda: t5x_plugin.PerExampleOptimizer(optax.adamw)),
    "Adafactor": (adafactor, adafactor),
}


def untimed(step: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in step.items() if not k.startswith(("timing/", "per_example/"))}


def assert_same_metrics(ours: list[dict[str, float]], theirs: list[dict[str, float]], rtol: float = 1e-5) -> None:
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        own, other = untimed(own), untimed(other)
        assert own.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(own[name], value, rtol=rtol, atol=1e-6, err_msg=f"{name} at step {step}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("architecture", small_t5x.MODELS)
def test_twenty_steps_equal_t5xs_own(architecture, optimizer):
    """With `monitor` the gradient is the mean of the examples', not T5X's."""
    make = functools.partial(small_t5x.MODELS[architecture], **NORMALIZED)
    theirs, ours = OPTIMIZERS[optimizer]
    own = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, make(ours()), monitor=True, learning_rate_fn=rate)
    other = small_t5x.make_trainer(t5x.trainer.Trainer, make(theirs()), learning_rate_fn=rate)
    own_steps, other_steps = small_t5x.train(own, STEPS), small_t5x.train(other, STEPS)
    losses = [[step["loss"] for step in steps] for steps in (own_steps, other_steps)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert_same_metrics(own_steps[:1], other_steps[:1])
    assert {k for k in own_steps[0] if k.startswith("timing/")} == {
        k for k in other_steps[0] if k.startswith("timing/")
    }


def test_scanned_layers():
    adamw = t5x_plugin.PerExampleOptimizer(optax.adamw)
    model = small_t5x.scalable_model(adamw, **NORMALIZED)
    own = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model, monitor=True)
    other = small_t5x.make_trainer(t5x.trainer.Trainer, model)
    assert_same_metrics(small_t5x.train(own, 2), small_t5x.train(other, 2))


@pytest.mark.parametrize(
    "factor", [None, 37, "NUM_REAL_TARGET_TOKENS", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"]
)
def test_every_normalizer_is_the_global_batchs(factor):
    """Rows have between 1 and 16 tokens, so a row's own normaliser is another."""
    how = {"loss_normalizing_factor": factor, "z_loss": 1e-3}
    make = functools.partial(small_t5x.decoder_only_model, **how)
    own = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, make(t5x.optimizers.sgd(0.1)), monitor=True)
    other = small_t5x.make_trainer(t5x.trainer.Trainer, make(t5x.optimizers.sgd(0.1)))
    without_rate = [{k: v for k, v in step.items() if "learning_rate" not in k} for step in small_t5x.train(other, 2)]
    assert_same_metrics(small_t5x.train(own, 2), without_rate)
    for a, b in zip(jax.tree.leaves(own.train_state.params), jax.tree.leaves(other.train_state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def plain_loop(model, params, batch):
    """Mean and mean square of the examples' gradients (B/W) ∇ℓ_i, example by example, with T5X's own loss."""
    size = len(batch["decoder_target_tokens"])
    normalizer = batch["decoder_loss_weights"].sum()
    model._loss_normalizing_factor = None  # the plain sum
    gradient = jax.jit(jax.grad(lambda p, row: model.loss_fn(p, row, None)[0] * size / normalizer))
    grads = [gradient(params, {k: x[i : i + 1] for k, x in batch.items()}) for i in range(size)]
    mean = jax.tree.map(lambda *g: sum(g) / size, *grads)
    return mean, jax.tree.map(lambda *g: sum(x**2 for x in g) / size, *grads)


@pytest.mark.parametrize("parameter_dims", [1, 2])
@pytest.mark.parametrize("architecture", small_t5x.MODELS)
def test_a_step_of_micro_adam_equals_a_loop_over_examples(architecture, parameter_dims):
    """parameter_dims = 2: parameters are sharded over data, too."""
    how = {"loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS"}
    model = small_t5x.MODELS[architecture](t5x_plugin.micro_adam(b1=0.8, eps=1e-3), **how)
    partitioner = small_t5x.make_partitioner(parameter_dims)
    trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model, partitioner)
    params = jax.device_get(trainer.train_state.params)
    specs = {str(x.sharding.spec) for x in jax.tree.leaves(trainer.train_state.params)}
    assert any("data" in spec for spec in specs) == (parameter_dims == 2) and any("model" in spec for spec in specs)
    [logged] = small_t5x.train(trainer, 1)

    reference = small_t5x.MODELS[architecture](None, **how)
    batch = next(small_t5x.batches(model))
    mean, mean_square = plain_loop(reference, params, batch)
    state = trainer.train_state.param_states
    states = [s for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "nu")) if hasattr(s, "nu")]
    for path, expected, moment, square in (
        *zip(*_leaves(mean), jax.tree.leaves(states[0].mu), [None] * 99, strict=False),
        *zip(*_leaves(mean_square), [None] * 99, jax.tree.leaves(states[0].nu), strict=False),
    ):
        actual = moment / 0.2 if square is None else square / 0.001
        np.testing.assert_allclose(actual, expected, rtol=3e-4, atol=1e-6, err_msg=path)
    for a, p, g, q in zip(*map(jax.tree.leaves, (trainer.train_state.params, params, mean, mean_square)), strict=True):
        np.testing.assert_allclose(a, p - 0.01 * g / (np.sqrt(q) + 1e-3), rtol=1e-4, atol=1e-5)
    for leaf, like in zip(jax.tree.leaves(states[0].nu), jax.tree.leaves(trainer.train_state.params), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    assert logged["per_example/non_finite_examples"] == 0
    noise = sum(np.sum(q - g**2) for g, q in zip(*map(jax.tree.leaves, (mean, mean_square)), strict=True)) * 16 / 15
    signal = sum(np.sum(g**2) for g in jax.tree.leaves(mean)) - noise / 16
    np.testing.assert_allclose(logged["per_example/noise_scale"], noise / signal, rtol=1e-2)
    np.testing.assert_allclose(logged["per_example/squared_snr"], signal / noise, rtol=1e-2)


def _leaves(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in leaves], [leaf for _, leaf in leaves]


def test_microbatches_change_no_number():
    def steps(number):
        model = small_t5x.decoder_only_model(t5x_plugin.micro_adam(), dropout_rate=0.2, **NORMALIZED)
        trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model, num_microbatches=number)
        return small_t5x.train(trainer, 2)

    assert_same_metrics(steps(4), steps(None))


def test_dropout_has_a_key_for_each_example_and_step():
    """Sixteen equal rows: without dropout there is no noise between them; with it, every loss is another."""

    def logged(dropout_rate):
        model = small_t5x.decoder_only_model(t5x_plugin.micro_adam(), dropout_rate=dropout_rate, **NORMALIZED)
        trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model, learning_rate_fn=lambda step: 0.0)
        batch = next(small_t5x.batches(model))
        batch = {name: np.repeat(x[:1], len(x), axis=0) for name, x in batch.items()}
        steps = [trainer.train(iter([batch]), 1).result() for _ in range(2)]
        return [(s["loss"].value, s["per_example/squared_snr"].value) for s in steps]

    (loss, snr), (again, _) = logged(0.0)
    assert loss == again and (snr < 0 or snr > 1e4)  # no noise but rounding
    (loss, snr), (again, _) = logged(0.5)
    assert loss != again and snr < 10


def test_hardware_keys():
    """`use_hardware_rng = True` in T5X's train."""
    with jax.default_prng_impl("unsafe_rbg"):
        model = small_t5x.decoder_only_model(t5x_plugin.micro_adam(), dropout_rate=0.2, **NORMALIZED)
        trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model)
        losses = [step["loss"] for step in small_t5x.train(trainer, 3)]
    assert np.all(np.isfinite(losses))


def test_replicas(monkeypatch):
    """ici_mesh_shape and dcn_mesh_shape give T5X a third mesh axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "data", "model"))
    partitioner = t5x.partitioning.PjitPartitioner(1, ici_mesh_shape=(2, 2, 2), dcn_mesh_shape=(1, 1, 1))
    monkeypatch.setattr(type(partitioner), "mesh", mesh)
    make = functools.partial(small_t5x.decoder_only_model, **NORMALIZED)
    adamw = t5x_plugin.PerExampleOptimizer(optax.adamw)
    own = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, make(adamw), partitioner, monitor=True)
    other = small_t5x.make_trainer(t5x.trainer.Trainer, make(adamw), partitioner)
    assert_same_metrics(small_t5x.train(own, 2), small_t5x.train(other, 2))


# --- optimizers and their states --------------------------------------------------------------------------------------


def every_optimizer():
    made = {name: getattr(t5x_plugin, name) for name in t5x_plugin.__all__ if name.islower()}
    built = {
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optimizers.micro_adam(1e-3)),
        "adafactor": optax.adafactor,
        "injected": optax.inject_hyperparams(optax.lion)(1e-3),
        "masked": lambda learning_rate: optax.multi_transform(
            {"a": optimizers.micro_adam(learning_rate), "b": optax.sgd(learning_rate)},
            lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "ab"["norm" in str(path)], params),
        ),
        "lookahead-like": optax.apply_if_finite(optax.adamw(1e-3), 3),
    }
    return made | {k: functools.partial(t5x_plugin.PerExampleOptimizer, v) for k, v in built.items()}


@pytest.mark.parametrize("name", sorted(every_optimizer()))
def test_every_state_is_sharded_and_comes_back(name):
    model = small_t5x.decoder_only_model(every_optimizer()[name](), **NORMALIZED)
    states = small_t5x.initializer(model, small_t5x.make_partitioner())
    state = states.from_scratch(jax.random.PRNGKey(0))
    axes = states.train_state_axes.state_dict()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.state_dict()["state"].get("param_states", {})):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kernel = leaf.ndim == 2 and name.endswith("mlp/wi/kernel")
        assert not kernel or leaf.sharding.spec == jax.sharding.PartitionSpec(None, "model"), name
    assert axes["target"]
    again = state.restore_state(jax.tree.map(np.asarray, state.state_dict()))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_that_does_not_fit_is_refused_by_name():
    states = [
        small_t5x.initializer(small_t5x.decoder_only_model(make()), small_t5x.make_partitioner()).from_scratch(
            jax.random.PRNGKey(0)
        )
        for make in (t5x_plugin.micro_adam, t5x_plugin.sign_sgd)
    ]
    with pytest.raises(ConfigError, match=r"missing there: 0/count, 0/nu/decoder.*assignment_map"):
        states[0].restore_state(states[1].state_dict())
    with pytest.raises(ConfigError, match="only there: 0/count"):
        states[1].restore_state(states[0].state_dict())


def test_t5xs_own_adamw_state_is_read():
    """The names are those of T5X's wrapper, so a run can change over to a trainer with statistics."""
    old = small_t5x.make_trainer(t5x.trainer.Trainer, small_t5x.decoder_only_model(t5x.optimizers.adamw(1e-3)))
    small_t5x.train(old, 1)
    new = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, small_t5x.decoder_only_model(t5x_plugin.micro_adam()))
    saved = jax.device_get(old.train_state.state_dict())
    saved["state"]["param_states"].pop("2", None)  # the schedule's count
    restored = new.train_state.restore_state(saved)
    for a, b in zip(jax.tree.leaves(restored.params), jax.tree.leaves(old.train_state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert restored.step == 1


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_orbax", [False, True], ids=["legacy", "orbax"])
def test_a_run_resumes_bit_for_bit_from_t5xs_checkpoints(tmp_path, use_orbax):
    def fresh():
        model = small_t5x.decoder_only_model(t5x_plugin.micro_adam(), dropout_rate=0.1, **NORMALIZED)
        return small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model)

    def manager(trainer):
        """The restored state, if there is one, and T5X's manager: what its `train` calls."""
        latest = utils.RestoreCheckpointConfig(path=str(tmp_path), mode="latest")
        restore, paths = utils.get_first_valid_restore_config_and_paths([latest])
        return utils.create_checkpoint_manager_and_restore(
            small_t5x.initializer(trainer._model, trainer._partitioner),
            trainer._partitioner,
            restore,
            paths[0] if paths else None,
            jax.random.PRNGKey(0),
            save_checkpoint_cfg=utils.SaveCheckpointConfig(period=2),
            model_dir=str(tmp_path),
            use_orbax=use_orbax,
        )

    straight = fresh()
    small_t5x.train(straight, 2)
    _, saver = manager(straight)
    saver.save(straight.train_state)
    if use_orbax:
        saver.close()
    small_t5x.train(straight, 2, seed=7)

    resumed = fresh()
    resumed.train_state, _ = manager(resumed)
    assert int(resumed.train_state.step) == 2
    small_t5x.train(resumed, 2, seed=7)
    leaves = [jax.tree.leaves(jax.device_get(t.train_state.state_dict())) for t in (straight, resumed)]
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a, b)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_loss_of_ones_own_is_refused_until_it_is_declared():
    class Own(t5x.models.DecoderOnlyModel):
        def loss_fn(self, params, batch, dropout_rng):
            return super().loss_fn(params, batch, dropout_rng)

    base = small_t5x.decoder_only_model(t5x_plugin.micro_adam())
    own = Own(base.module, base.input_vocabulary, base.optimizer_def)
    with pytest.raises(ConfigError, match="Own has a loss_fn of its own.*own_loss_is_sum = True"):
        small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, own)
    trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, own, own_loss_is_sum=True)
    assert np.isfinite(small_t5x.train(trainer, 1)[0]["loss"])


def test_a_metric_that_is_no_sum_is_refused_by_name():
    class Last(t5x.models.DecoderOnlyModel):
        def _compute_metrics(self, *args, **kwargs):
            metrics = super()._compute_metrics(*args, **kwargs)
            return {**metrics, "temperature": clu.metrics.LastValue.from_model_output(jnp.ones(1))}

    base = small_t5x.decoder_only_model(t5x_plugin.micro_adam())
    last = Last(base.module, base.input_vocabulary, base.optimizer_def)
    trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, last)
    with pytest.raises(ConfigError, match="metric 'temperature', a LastValue, is not a sum over examples"):
        small_t5x.train(trainer, 1)


def test_statistics_of_a_batch_are_refused_by_name():
    model = small_t5x.decoder_only_model(t5x_plugin.micro_adam())
    trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model)
    state = trainer.train_state.replace_flax_mutables({"batch_stats": {"mean": jnp.zeros(3)}})
    with pytest.raises(ConfigError, match="flax_mutables: batch_stats"):
        t5x_plugin.PerExampleTrainer(
            model, state, trainer._partitioner, (), None, trainer._train_state_axes, trainer._base_rng, rate
        )


def test_our_optimizer_in_t5xs_wrapper_is_refused():
    model = small_t5x.decoder_only_model(t5x.optimizers.OptaxWrapper(optimizers.micro_adam(1e-3)))
    with pytest.raises((ConfigError, ValueError), match="PerExampleOptimizer|unregistered optax state"):
        small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model)


def test_a_batch_that_does_not_split_is_refused():
    model = small_t5x.decoder_only_model(t5x_plugin.micro_adam())
    trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model, num_microbatches=3)
    with pytest.raises(
        ConfigError, match="BATCH_SIZE = 16 does not split evenly: 4 data shards x num_microbatches = 3"
    ):
        small_t5x.train(trainer, 1)


def test_a_misspelt_argument_of_an_optimizer_is_refused():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'b3'"):
        t5x_plugin.micro_adam(b3=0.5)


@pytest.mark.parametrize("argument", [{"non_finite": "drop"}, {"group_size": 0}, {"microbatch_size": "atuo"}])
def test_an_argument_out_of_range_is_refused_first_of_all(argument):
    [(name, value)] = argument.items()
    with pytest.raises(ConfigError, match=f"PerExampleTrainer.{name} = {value!r}"):
        t5x_plugin.PerExampleTrainer(None, None, None, (), None, None, None, **argument)


# --- the rest of the trainer ------------------------------------------------------------------------------------------


def test_weight_metrics_eval_and_the_rate_are_t5xs():
    make = functools.partial(small_t5x.decoder_only_model, **NORMALIZED)
    adamw = t5x_plugin.PerExampleOptimizer(optax.adamw)
    options = {"weight_metrics_computer": t5x.trainer.WeightMetricsComputer(), "learning_rate_fn": rate}
    own = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, make(adamw), monitor=True, **options)
    other = small_t5x.make_trainer(t5x.trainer.Trainer, make(adamw), **options)
    steps = small_t5x.train(own, 1), small_t5x.train(other, 1)
    assert {"learning_rate/current", "weight_gradient_norm"} < steps[0][0].keys()
    assert_same_metrics(*steps, rtol=1e-4)
    evals = [
        t.eval({"small": (b for b, _ in zip(small_t5x.batches(t._model, 5), range(2), strict=False))})
        for t in (own, other)
    ]
    np.testing.assert_allclose(evals[0]["small"]["loss"].value, evals[1]["small"]["loss"].value, rtol=1e-5)


@pytest.mark.parametrize("make", [t5x_plugin.micro_adam, t5x.optimizers.sgd])
def test_a_rate_of_the_optimizers_own_is_not_logged_as_the_schedules(make):
    model = small_t5x.decoder_only_model(make(learning_rate=0.5))
    trainer = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model)
    assert "learning_rate/current" not in small_t5x.train(trainer, 1)[0]


def test_plain_steps_are_t5xs_own():
    model = small_t5x.decoder_only_model(t5x_plugin.PerExampleOptimizer(optax.adamw), **NORMALIZED)
    own = small_t5x.make_trainer(t5x_plugin.PerExampleTrainer, model)
    other = small_t5x.make_trainer(t5x.trainer.Trainer, model)
    assert not any(name.startswith("per_example/") for name in small_t5x.train(own, 1)[0])
    small_t5x.train(other, 1)
    for a, b in zip(jax.tree.leaves(own.train_state.params), jax.tree.leaves(other.train_state.params), strict=True):
        np.testing.assert_array_equal(a, b)
