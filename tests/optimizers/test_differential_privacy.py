"""`optimizers.dp`: the clipped sum against a loop, the noise measured, on any mesh, resumed; ε; in the trainer."""

import functools
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.serialization import from_state_dict, to_state_dict
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x import optimizers, per_example
from perex_t5x.errors import ConfigError
from perex_t5x.partitioning import PjitPartitioner, standard_logical_axis_rules
from perex_t5x.trainer import Trainer, example_keys
from tests import tiny
from tests.per_example.loop_reference import single_gradients
from tests.trainer_support import (
    BATCH,
    assert_close,
    assert_same,
    gradient_of,
    initial_state,
    make_model,
    make_partitioner,
    make_trainer,
    run,
)

C, N, SEED = 0.5, 6, 12345678901
PRIVATE = {"clip_norm": C, "non_finite": "skip"}


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])


def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (3, 4)), "v": jax.random.normal(keys[1], (4,))}
    return params, jnp.array([0.01, 0.1, 0.5, 1.0, 5.0, 50.0])[:, None] * jax.random.normal(keys[2], (N, 3))


def dp(inner=None, **arguments):
    defaults = {"clip_norm": C, "noise_multiplier": 0.0, "batch_size": N, "seed": SEED}
    return optimizers.dp(optax.sgd(1.0) if inner is None else inner, **{**defaults, **arguments})


def step(optimizer, params, x, state=None, weights=None, **options):
    compute = per_example.grad_statistics(loss, optimizer.needs, **{**PRIVATE, **options})
    stats, _ = compute(params, x, weights=weights)
    return optimizer.update(stats.mean, state or optimizer.init(params), params, statistics=stats)


def norm_of(tree):
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(tree)))


def clipped_sum(gradients):
    """Σ g · min(1, C/‖g‖), by a loop."""
    total = jax.tree.map(np.zeros_like, gradients[0])
    for g in gradients:
        scale = min(1.0, C / norm_of(g))
        total = jax.tree.map(lambda t, x, c=scale: t + c * x, total, g)
    return total


# --- the sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"method": "vmap"}], ids=str)
def test_without_noise_it_is_the_clipped_sum_of_a_loop(options):
    params, x = problem()
    updates, _ = step(dp(), params, x, **options)
    assert_close(updates, jax.tree.map(lambda s: -s / N, clipped_sum(single_gradients(loss, params, x))))


def test_padding_counts_for_nothing():
    """Neither in the sum nor in the divisor, which is fixed; however much of it there is, and not finite either."""
    params, x = problem()
    wanted = jax.tree.map(lambda s: -s / 4, clipped_sum(single_gradients(loss, params, x[:3])))
    optimizer = dp(batch_size=4)
    assert_close(step(optimizer, params, x[:3])[0], wanted)
    assert_close(step(optimizer, params, x, weights=np.arange(N) < 3)[0], wanted)
    assert_close(step(optimizer, params, x.at[3:].set(jnp.nan), weights=np.arange(N) < 3)[0], wanted)
    assert_close(step(optimizer, params, x.at[3:].set(jnp.inf))[0], wanted)  # skipped
    nothing, _ = step(optimizer, params, x, weights=np.zeros(N, bool))
    assert all(not np.any(u) for u in jax.tree.leaves(nothing))


# --- the noise --------------------------------------------------------------------------------------------------------


def noise_of(optimizer, params, steps=1, shardings=None, jit=True):
    """Updates of steps whose gradients are 0."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    bound = per_example.Sensitivity(C)
    stats = per_example.GradStatistics({"mean": zeros}, *(jnp.float32(N),) * 4, sensitivity=bound)
    update = lambda s: optimizer.update(zeros, s, params, statistics=stats)  # noqa: E731
    update = jax.jit(update, out_shardings=None if shardings is None else (shardings, None)) if jit else update
    state, updates = optimizer.init(params), []
    for _ in range(steps):
        drawn, state = update(state)
        updates.append(drawn)
    return updates, state


def test_the_noise_is_normal_with_the_stated_deviation():
    sigma, batch_size = 1.7, 20
    params = {"a": jnp.zeros((200, 300)), "b": jnp.zeros((60000,)), "c": jnp.zeros((3,), jnp.bfloat16)}
    optimizer = dp(noise_multiplier=sigma, batch_size=batch_size)
    (one, two), _ = noise_of(optimizer, params, 2)
    deviation = sigma * C / batch_size
    draws = [np.ravel(np.asarray(x, np.float64)) / deviation for t in (one, two) for x in (t["a"], t["b"])]
    for z in draws:
        # 60 000 draws: standard errors are 0.0041 for the mean, 0.0029 for the deviation, 0.02 for the kurtosis.
        assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.015 and abs((z**4).mean() - 3) < 0.1
    correlations = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlations).max() < 0.02  # between steps and between parameters
    assert not noise_of(dp(), params)[0][0]["a"].any()


def test_the_noise_depends_on_the_seed_alone():
    params = {"w": jnp.zeros((8, 16)), "v": jnp.zeros(8)}
    make = functools.partial(dp, noise_multiplier=1.0)
    wanted, _ = noise_of(make(), params, 2)
    assert_same(noise_of(make(), params, 2)[0], wanted)
    assert_close(noise_of(make(), params, 2, jit=False)[0], wanted, rtol=1e-6)  # rounded at other places
    with jax.default_prng_impl("rbg"):
        assert_same(noise_of(make(), params, 2)[0], wanted)
    for other in (SEED + 1, SEED + 2**32, SEED % 2**32):  # all 64 bits count
        assert not np.allclose(noise_of(make(seed=other), params)[0][0]["w"], wanted[0]["w"])


@pytest.mark.parametrize("specs", [("data", "model"), (None, "data"), (("data", "model"), None)], ids=str)
def test_the_noise_does_not_depend_on_the_mesh(specs):
    """Parameters spread over 8 devices get, bit for bit, the noise that they have on one: devices add none of their own."""
    mesh = PjitPartitioner(num_partitions=2).mesh
    shardings = {"w": NamedSharding(mesh, PartitionSpec(*specs)), "v": NamedSharding(mesh, PartitionSpec("data"))}
    params = {"w": jnp.zeros((8, 16)), "v": jnp.zeros(8)}
    optimizer = dp(noise_multiplier=1.0)
    wanted, _ = noise_of(optimizer, params, 2)
    found, _ = noise_of(optimizer, jax.device_put(params, shardings), 2, shardings)
    assert found[0]["w"].sharding.is_equivalent_to(shardings["w"], 2)
    assert_same(found, wanted)


def test_a_saved_state_continues_to_the_bit():
    params, x = problem()
    optimizer = dp(optax.adamw, learning_rate=0.1, noise_multiplier=1.0)

    def go_on(params, state, rows):
        for i in rows:
            updates, state = step(optimizer, params, x + i, state)
            params = optax.apply_updates(params, updates)
        return params, state

    half, state = go_on(params, None, range(2))
    wanted = go_on(half, state, range(2, 4))
    saved = jax.tree.map(np.array, to_state_dict(state))
    assert_same(go_on(half, from_state_dict(optimizer.init(params), saved), range(2, 4)), wanted)
    fresh, _ = go_on(half, state._replace(key=optimizer.init(params).key), range(2, 4))
    assert not np.array_equal(fresh["w"], wanted[0]["w"])


# --- the optimizer inside, and around ---------------------------------------------------------------------------------


def test_the_inner_optimizer_sees_the_private_mean():
    params, x = problem()
    mean = jax.tree.map(lambda u: -u, step(dp(noise_multiplier=1.0), params, x)[0])
    for inner in (optax.adamw(0.1), optimizers.adam(0.1), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))):
        wanted, _ = inner.update(mean, inner.init(params), params)
        assert_close(step(dp(inner, noise_multiplier=1.0), params, x)[0], wanted)
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    by_rate = optimizers.dp(
        optax.sgd, schedule, clip_norm=C, noise_multiplier=1.0, batch_size=N, seed=SEED
    )  # as a function of the rate
    updates, state = step(by_rate, params, x)
    assert_close(updates, jax.tree.map(lambda m: -m, mean))
    assert to_state_dict(state)["inner"]


def test_needs_and_privacy_are_found_through_wrappers():
    params, _ = problem()
    optimizer = optax.chain(dp(noise_multiplier=0.9), optax.scale(0.5))
    assert optimizers.needs_of(optimizer, params) == ("mean",)
    assert optimizers.privacy_of(optimizer, params) == optimizers.Privacy(C, 0.9, N)
    assert optimizers.privacy_of(optimizers.micro_adam, params) is None


def test_what_would_not_be_private_is_refused():
    params, x = problem()
    given = {"clip_norm": C, "noise_multiplier": 1.0, "batch_size": N, "seed": SEED}
    with pytest.raises(ConfigError, match=r"reads 'mean_square', which no noise is added to"):
        dp(optimizers.micro_adam(0.1)).init(params)
    with pytest.raises(ConfigError, match=r"sensitivity is None.*clip_norm=0.5, non_finite='skip'"):
        step(dp(), params, x, clip_norm=None)
    with pytest.raises(ConfigError, match=r"sensitivity is None.*booleans"):
        step(dp(), params, x, weights=np.ones(N, np.float32))
    with pytest.raises(ConfigError, match=r"by up to 0.6, and the noise is meant for clip_norm = 0.5"):
        step(dp(), params, x, clip_norm=0.6)
    with pytest.raises(ConfigError, match=r"by up to 1, .* in groups of one"):
        step(dp(), params, x, group_size=2)
    with pytest.raises(ConfigError, match=r"the updates are not the statistics' mean"):
        step(_as_ours(optax.chain(optax.scale(2.0), dp())), params, x)
    with pytest.raises(ConfigError, match=r"the updates are not the statistics' mean.*outside optax.masked"):
        step(_as_ours(optax.masked(dp(), {"w": True, "v": False})), params, x)
    with pytest.raises(ConfigError, match=r"dp needs the statistics 'mean', but update got no statistics="):
        dp().update(params, dp().init(params), params)
    with pytest.raises(ConfigError, match=r"inside optax.MultiSteps"):
        optax.MultiSteps(dp(), 2).init(params)
    with pytest.raises(ConfigError, match=r"already built.*@optax.adamw"):
        optimizers.dp(optax.adamw(0.1), 0.1, **given)
    with pytest.raises(ConfigError, match=r"adamw is a function of a learning rate"):
        optimizers.dp(optax.adamw, **given)
    with pytest.raises(ConfigError, match=r"optimizer = 'adamw'"):
        optimizers.dp("adamw", 0.1, **given)
    for name, value in (("clip_norm", 0.0), ("noise_multiplier", -1.0), ("batch_size", 0), ("seed", -1), ("seed", 0.5)):
        with pytest.raises(ConfigError, match=f"dp: {name} = {value}"):
            optimizers.dp(optax.sgd(0.1), **{**given, name: value})


def _as_ours(optimizer):
    """`step` asks for `needs`."""
    made = optimizers.StatisticsTransformation(*optimizer)
    made.needs = ("mean",)
    return made


# --- ε ----------------------------------------------------------------------------------------------------------------


def gaussian_delta(epsilon, mu):
    """δ(ε) of a Gaussian mechanism with sensitivity/deviation μ (Balle & Wang 2018, theorem 8)."""
    normal = lambda t: 0.5 * math.erfc(-t / math.sqrt(2))  # noqa: E731
    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 4), (4.0, 3), (0.8, 2)])
def test_epsilon_of_whole_batches_is_the_gaussian_mechanisms(sigma, steps):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (extra 'dp')")
    epsilon = optimizers.dp_epsilon(noise_multiplier=sigma, steps=steps, delta=1e-5)
    assert gaussian_delta(epsilon, math.sqrt(steps) / sigma) == pytest.approx(1e-5, rel=0.01)


def test_epsilon_of_sampled_batches():
    rdp = pytest.importorskip("dp_accounting.rdp", reason="dp-accounting is not installed (extra 'dp')")
    import dp_accounting

    given = {"noise_multiplier": 1.1, "sampling_probability": 256 / 60000, "steps": 14063, "delta": 1e-5}
    epsilon = optimizers.dp_epsilon(**given)
    # Another accountant, whose bound is known to be looser; and without sampling there is no privacy to speak of.
    event = dp_accounting.PoissonSampledDpEvent(given["sampling_probability"], dp_accounting.GaussianDpEvent(1.1))
    assert 0.7 < epsilon / rdp.RdpAccountant().compose(event, given["steps"]).get_epsilon(1e-5) < 1.0
    assert optimizers.dp_epsilon(**{**given, "steps": 2 * given["steps"]}) > epsilon
    assert optimizers.dp_epsilon(**{**given, "noise_multiplier": 2.0}) < epsilon
    assert optimizers.dp_epsilon(**{**given, "sampling_probability": 1.0, "steps": 60}) > 10 * epsilon
    assert optimizers.dp_epsilon(**{**given, "noise_multiplier": 0.0}) == math.inf
    assert optimizers.dp_epsilon(**{**given, "steps": 0}) == 0.0


def test_epsilon_says_what_it_misses(monkeypatch):
    given = {"noise_multiplier": 1.0, "steps": 1, "delta": 1e-5}
    for name, value in (("delta", 0.0), ("steps", 1.5), ("noise_multiplier", -1.0), ("sampling_probability", 0.0)):
        with pytest.raises(ConfigError, match=f"dp_epsilon: {name} = {value} must be"):
            optimizers.dp_epsilon(**{**given, name: value})
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=re.escape("dp_epsilon needs the extra [dp]: pip install 'perex_t5x[dp]'")):
        optimizers.dp_epsilon(**given)


# --- another implementation -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_jax_privacy_agrees(microbatch_size):
    """On a small network: the clipped sum, with and without padding and examples that are not finite; the sensitivity."""
    clipping = pytest.importorskip(
        "jax_privacy.clipping", reason="jax-privacy is not installed (pip install jax-privacy)"
    )
    params, x = problem()
    theirs = clipping.clipped_grad(loss, l2_clip_norm=C, microbatch_size=microbatch_size, normalize_by=N)
    ours = functools.partial(step, dp(), params, microbatch_size=microbatch_size)
    assert_close(jax.tree.map(lambda u: -u, ours(x)[0]), theirs(params, x))
    real = np.array([True, False, True, True, False, True])
    padded = theirs(params, x, is_padding_example=jnp.asarray(~real))
    assert_close(jax.tree.map(lambda u: -u, ours(x, weights=real)[0]), padded)
    lost = x.at[2].set(jnp.nan)
    assert_close(jax.tree.map(lambda u: -u, ours(lost)[0]), theirs(params, lost))
    stats, _ = per_example.grad_statistics(loss, ("mean",), clip_norm=C)(params, x)
    assert stats.sensitivity.mean == pytest.approx(theirs.sensitivity())
    assert stats.sensitivity.sum == clipping.clipped_grad(loss, l2_clip_norm=C).sensitivity()


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "steps"), [(256, 1000), (60000, 3)])
def test_jax_privacy_s_accountant_agrees(batch_size, steps):
    """Poisson sampling, and whole batches."""
    analysis = pytest.importorskip("jax_privacy.accounting.analysis", reason="jax-privacy is not installed")
    from jax_privacy.accounting.accountants import PldAccountantConfig

    whole = analysis.DpParams(noise_multipliers=1.1, num_samples=60000, delta=1e-5, batch_size=batch_size)
    theirs = analysis.DpsgdTrainingAccountant(PldAccountantConfig()).compute_epsilon(steps, whole)
    given = {"noise_multiplier": 1.1, "steps": steps, "delta": 1e-5}
    ours = optimizers.dp_epsilon(**given, sampling_probability=batch_size / 60000)
    assert ours == pytest.approx(theirs, rel=1e-3)


# --- in the trainer ---------------------------------------------------------------------------------------------------

DROPOUT = "DROPOUT_RATE = 0.1"


def private_adamw(learning_rate, **changes):
    given = {"clip_norm": C, "noise_multiplier": 0.5, "batch_size": BATCH, "seed": SEED, **changes}
    return optimizers.dp(optax.adamw, learning_rate, **given)


def own_loss_gradients(batch, *bindings):
    """∇ of each row's own loss, ℓ_i / W_i with W_i of that row alone, by a loop."""
    model = make_model(*bindings)
    state = initial_state(Trainer(model, make_partitioner(), 0.01), batch)
    keys = example_keys(state.rng, state.step, BATCH)

    @jax.jit
    def of_one(row, key):
        return jax.grad(lambda p: model.loss_fn(p, row, key[None])[0])(state.params)

    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(BATCH)]
    return [jax.tree.map(lambda g: np.asarray(g, np.float64), of_one(rows[i], keys[i])) for i in range(BATCH)]


FSDP = {"logical_axis_rules": standard_logical_axis_rules(parameter_partitioning_dims=2)}


@pytest.mark.parametrize(
    ("factor", "arguments"),
    [
        pytest.param("'NUM_REAL_TARGET_TOKENS'", {}, marks=pytest.mark.slow),
        ("'AVERAGE_PER_SEQUENCE'", {"num_microbatches": 2, "mesh": (4, 2)}),
        pytest.param("'NUM_REAL_TARGET_TOKENS'", {"fsdp": True}, marks=pytest.mark.slow),
        pytest.param("None", {"mesh": (8, 1)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_examples_gradient_is_that_of_its_own_loss(factor, arguments):
    """Whatever the model's normaliser: that of a global batch depends on all of its examples."""
    batch = tiny.random_batch(BATCH)
    bindings = (DROPOUT, f"LOSS_NORMALIZING_FACTOR = {factor}")
    gradients = own_loss_gradients(batch, *bindings)
    trainer = make_trainer(private_adamw, *bindings, **{k: v for k, v in arguments.items() if k != "fsdp"})
    if "fsdp" in arguments:
        trainer = trainer.replace(partitioner=PjitPartitioner(num_partitions=1, **FSDP))
    found = gradient_of(trainer, batch)
    wanted = jax.tree.map(lambda s: s / BATCH, clipped_sum(gradients))
    assert_close(found.mean, wanted, rtol=1e-4)
    assert found.statistics.sensitivity == per_example.Sensitivity(C)
    norms = [norm_of(g) for g in gradients]
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    assert max(norms) > C


def test_one_row_moves_the_update_by_no_more_than_the_clip_norm():
    """The batch's W would change with the row; with a row's own, the other rows' gradients stay as they are."""
    batch = tiny.random_batch(BATCH)
    neighbour = {k: np.where(np.arange(BATCH)[:, None] == 5, 0, v) for k, v in batch.items()}  # zeroed out: padding
    whole, without = (gradient_of(make_trainer(private_adamw), rows) for rows in (batch, neighbour))
    assert without.norms[5] == 0 and whole.statistics.weight_sum == without.statistics.weight_sum == BATCH
    moved = BATCH * norm_of(jax.tree.map(jnp.subtract, whole.mean, without.mean))
    assert moved == pytest.approx(min(float(whole.norms[5]), C), rel=1e-3)


def test_steps_are_the_same_on_every_mesh():
    """The noise is larger than the gradient here: were it another one on any device, parameters would differ by as much."""
    one, metrics = run(make_trainer(private_adamw, DROPOUT), 2)
    sharded, _ = run(make_trainer(private_adamw, DROPOUT, mesh=(4, 2)), 2)
    assert_close(sharded.params, one.params, rtol=2e-3)
    assert_same(sharded.opt_state.key, one.opt_state.key)
    size, decays = sum(x.size for x in jax.tree.leaves(one.params)), math.hypot(0.1, 0.09)  # of AdamW's two steps
    expected = 0.5 * C / BATCH * math.sqrt(size) * decays
    assert norm_of(one.opt_state.inner[0].mu) == pytest.approx(expected, rel=0.2) and expected > 2 * 0.19 * C
    assert np.isfinite(metrics[-1]["objective"])


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (
            {"clip_norm": 2.0},
            {},
            r"Trainer.clip_norm = 2.0 with a differentially private .* Set Trainer.clip_norm = None",
        ),
        ({"group_size": 2}, {}, r"Trainer.group_size = 2 .* Set Trainer.group_size = 1"),
        ({"unit": "token"}, {}, r"Trainer.unit = 'token'.* Set Trainer.unit = 'example'"),
        (
            {"transport_dtype": "bfloat16"},
            {},
            r"Trainer.transport_dtype = 'bfloat16'.* Set Trainer.transport_dtype = None",
        ),
        ({}, {"batch_size": 8}, r"optimizers.dp.batch_size = 8, and a batch has 16 examples.*%BATCH_SIZE"),
    ],
)
def test_trainers_that_would_not_be_private_are_refused_before_compiling(arguments, changes, message):
    trainer = make_trainer(lambda learning_rate: private_adamw(learning_rate, **changes), **arguments)
    with pytest.raises(ConfigError, match=message):
        trainer.abstract_state({k: v.shape for k, v in tiny.random_batch(BATCH).items()})
    trainer = make_trainer(private_adamw, clip_norm=C)  # the same, said twice
    trainer.abstract_state({k: v.shape for k, v in tiny.random_batch(BATCH).items()})


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(tmp_path):
    files = ("models/tiny.gin", "runs/pretrain.gin", "optimizers/dp_adamw.gin")
    bindings = (
        "NOISE_SEED = 8031923482",
        "models.T5Config.num_decoder_layers = 1",
        "train_script.train.train_eval_dataset_cfg = None",
        "utils.SaveCheckpointConfig.period = 2",
    )
    _, through = tiny.train(tmp_path / "through", "TRAIN_STEPS = 4", *bindings, files=files)
    tiny.train(tmp_path / "halves", "TRAIN_STEPS = 2", *bindings, files=files)
    step, halves = tiny.train(tmp_path / "halves", "TRAIN_STEPS = 4", *bindings, files=files)
    assert step == 4
    assert_same(halves.params, through.params)
    assert_same(halves.opt_state, through.opt_state)


# --- the documentation ------------------------------------------------------------------------------------------------


def test_the_code_of_the_page_runs():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for code in blocks:
        exec(code, names)
    assert len(blocks) == 3
    for name, value in re.findall(r"(\w+) = optimizers.dp_epsilon\(.*?\)  # ([\d.]+)", text):
        assert round(names[name], 2) == float(value), name
