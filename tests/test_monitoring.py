"""Monitoring: the numbers are those of the definition, and no trajectory, checkpoint or step between them notices."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers
from perex_t5x.errors import ConfigError
from perex_t5x.gradients import GradientOptions, gradient_with_statistics
from perex_t5x.monitoring import Monitor, parameter_kind, shown
from perex_t5x.partitioning import ParamShardings
from perex_t5x.train_state import TrainState
from tests import tiny
from tests.trainer_support import assert_same, make_partitioner, make_trainer, run

DROPOUT = "DROPOUT_RATE = 0.1"
KINDS = {"all", "attention", "embedding", "logits", "mlp", "norm"}


@functools.cache
def runs(name, monitored, **arguments):
    optimizer = {"adamw": optax.adamw, "micro_adam": optimizers.micro_adam}[name]
    monitor = Monitor(period=2) if monitored else None
    return run(make_trainer(optimizer, DROPOUT, monitor=monitor, **arguments), 6)


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "micro_adam"])
def test_monitoring_changes_no_trajectory(name):
    """Bit for bit, with dropout."""
    without, _ = runs(name, False)
    with_it, metrics = runs(name, True)
    assert_same((without.params, without.opt_state, without.rng), (with_it.params, with_it.opt_state, with_it.rng))
    assert without.monitor is None
    assert [m["measured"] is not None for m in metrics] == [False, True] * 3
    assert with_it.monitor["trace"]["all"] > 0


def test_names():
    _, metrics = runs("adamw", True)
    names = {name.removeprefix("per_example/") for name in metrics[-1]["measured"]}
    ratios = {"snr", "snr_smoothed", "signal_to_mean_noise", "noise_scale", "noise_scale_smoothed"}
    norms = {f"gradient_norm/{q}" for q in ("min", "quarter", "median", "three_quarters", "max")}
    single = {"noise_scale_norm_layers", "non_finite_examples", "variance_clamps"}
    assert names == {f"{ratio}/{kind}" for ratio in ratios for kind in KINDS} | norms | single
    assert metrics[-1]["measured"]["per_example/non_finite_examples"] == 0


@pytest.mark.slow
def test_optimizers_measure_the_same():
    """The first measured step follows one update by AdamW or MicroAdam at rate 0: the same parameters."""
    found = [
        run(make_trainer(o, DROPOUT, monitor=Monitor(period=2), rate=0.0, **more), 2)[1][-1]["measured"]
        for o, more in ((optax.adamw, {}), (optimizers.micro_adam, {"num_microbatches": 4, "mesh": (4, 1)}))
    ]
    for name, value in found[0].items():
        if "variance_clamps" not in name:  # a matter of rounding
            np.testing.assert_allclose(found[1][name], value, rtol=2e-3, err_msg=name)


# --- the numbers ------------------------------------------------------------------------------------------------------


class LinearModel:
    """Its examples' gradients are the batch's rows."""

    def loss_normalizer(self, batch):
        return jnp.float32(len(jax.tree.leaves(batch)[0]))

    def loss_fn(self, p, batch, keys, normalizer):
        loss = sum(jnp.sum(a[None] * b) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(batch), strict=True))
        return loss / normalizer, {}


def of_rows(rows):
    """What `gradient_with_statistics` gives for examples whose gradients are `rows`."""
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), rows)
    state = TrainState(jnp.int32(0), params, {}, jax.random.key_data(jax.random.key(0)))
    partitioner = make_partitioner()
    shardings = ParamShardings(partitioner, jax.tree.map(lambda _: partitioner.replicated, params))
    return gradient_with_statistics(
        LinearModel(), state, rows, Monitor.statistics, shardings, GradientOptions(), norms=True
    )


def example_rows(seed, count=8, mean=0.5):
    rng = np.random.default_rng(seed)
    shapes = {"mlp": {"kernel": (4, 3)}, "final_norm": {"scale": (5,)}}
    return jax.tree.map(
        lambda s: rng.normal(mean, 1.0, (count, *s)).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def by_hand(x):
    """(tr Σ̂, |μ̂|²) of gradients [N, D], in float64."""
    x = np.asarray(x, np.float64).reshape(len(x), -1)
    trace = x.var(axis=0, ddof=1).sum()
    return trace, (x.mean(axis=0) ** 2).sum() - trace / len(x)


def test_the_numbers_are_those_of_the_definition():
    monitor = Monitor(period=1, ema=0.75)
    state, parts = monitor.init(example_rows(0)), {}
    averages = {}
    for seed in range(3):
        rows = example_rows(seed)
        state, values = monitor.measured(state, of_rows(rows))
        whole = np.concatenate([x.reshape(8, -1) for x in jax.tree.leaves(rows)], axis=1)
        parts = {"all": whole, "mlp": rows["mlp"]["kernel"], "norm": rows["final_norm"]["scale"]}
        for group, x in parts.items():
            now = np.array(by_hand(x))
            averages[group] = 0.75 * averages.get(group, np.zeros(2)) + 0.25 * now
    v = {name.removeprefix("per_example/"): float(x) for name, x in values.items()}
    for group, x in parts.items():
        trace, square = by_hand(x)
        assert v[f"snr/{group}"] == pytest.approx(np.sqrt(square / trace), rel=1e-4)
        assert v[f"signal_to_mean_noise/{group}"] == pytest.approx(square / (trace / 8), rel=1e-4)
        assert v[f"noise_scale/{group}"] == pytest.approx(trace / square, rel=1e-4)
        smoothed = averages[group][0] / averages[group][1]
        assert v[f"noise_scale_smoothed/{group}"] == pytest.approx(smoothed, rel=1e-4)
        assert v[f"snr_smoothed/{group}"] == pytest.approx(smoothed**-0.5, rel=1e-4)
    assert v["noise_scale_norm_layers"] == v["noise_scale_smoothed/norm"]
    norms = np.linalg.norm(parts["all"], axis=1)
    quantiles = [v[f"gradient_norm/{q}"] for q in ("min", "quarter", "median", "three_quarters", "max")]
    np.testing.assert_allclose(quantiles, np.quantile(norms, [0, 0.25, 0.5, 0.75, 1]), rtol=1e-5)
    assert shown(values) == {"snr": v["snr_smoothed/all"], "noise scale": v["noise_scale_smoothed/all"]}


def test_no_signal_is_an_infinite_noise_scale():
    rows = jax.tree.map(lambda x: np.concatenate([x, -x]), example_rows(0))
    monitor = Monitor(period=1)
    _, values = monitor.measured(monitor.init(rows), of_rows(rows))
    v = {name.removeprefix("per_example/"): float(x) for name, x in values.items()}
    assert v["noise_scale/all"] == v["noise_scale_smoothed/all"] == np.inf
    assert v["snr/all"] == v["snr_smoothed/all"] == 0 and v["signal_to_mean_noise/all"] < 0


def test_a_measurement_that_is_not_finite_is_told_and_forgotten():
    monitor, rows = Monitor(period=1), example_rows(0)
    state, _ = monitor.measured(monitor.init(rows), of_rows(rows))
    bad = example_rows(1)
    bad["mlp"]["kernel"][3, 0, 0] = np.inf
    after, values = monitor.measured(state, of_rows(bad))
    v = {name.removeprefix("per_example/"): float(x) for name, x in values.items()}
    assert v["non_finite_examples"] == 1 and not np.isfinite(v["noise_scale/all"])
    assert after["trace"]["all"] == state["trace"]["all"] and after["trace"]["norm"] != state["trace"]["norm"]
    assert np.isfinite(v["gradient_norm/max"])  # of the others


def test_only_norm_layers():
    trainer = make_trainer(optax.adamw, monitor=Monitor(period=1, only_norm_layers=True))
    whole = make_trainer(optax.adamw, monitor=Monitor(period=1))
    (_, [cheap]), (_, [full]) = run(trainer, 1), run(whole, 1)
    cheap, full = cheap["measured"], full["measured"]
    assert not any("/all" in name or "gradient_norm" in name for name in cheap)
    name = "per_example/noise_scale_norm_layers"
    np.testing.assert_allclose(cheap[name], full[name], rtol=1e-4)
    np.testing.assert_allclose(cheap["per_example/snr/norm_layers"], full["per_example/snr/norm"], rtol=1e-4)
    assert set(shown(cheap)) == {"snr", "noise scale"}


def test_groups_of_ones_own():
    params = {"a": {"w": jnp.zeros(2)}, "b": {"w": jnp.zeros(2)}}
    monitor = Monitor(groups=lambda name: "of/" + name.split("/")[0])
    assert monitor.groups_of(params) == {"all": ["a/w", "b/w"], "of.a": ["a/w"], "of.b": ["b/w"]}
    assert set(Monitor(groups=None).groups_of(params)) == {"all"}
    assert parameter_kind("decoder/layers_0/self_attention/query/kernel") == "attention"


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Monitor(period=0), "Monitor.period = 0: must be a whole number, at least 1"),
        (lambda: Monitor(ema=1.0), r"Monitor.ema = 1.0: must be a number in \[0, 1\)"),
        (lambda: Monitor(groups="norm"), r"Monitor.groups = 'norm': must be a function \(@...\) or None, not a text"),
        (lambda: Monitor(norm_layers="("), "Monitor.norm_layers = .* is not a regular expression"),
        (
            lambda: Monitor(only_norm_layers=True, norm_layers="nosuch").init({"w": jnp.zeros(2)}),
            "Monitor.norm_layers = 'nosuch' matches none of the parameters' names: w",
        ),
        (lambda: Monitor(groups=lambda name: "all").init({"w": jnp.zeros(2)}), "Monitor.groups gives 'all' for 'w'"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# --- whole runs -------------------------------------------------------------------------------------------------------

FILES = ("models/tiny.gin", "runs/pretrain.gin", "optimizers/micro_adam.gin", "runs/monitor.gin")
EACH = ("MONITOR_PERIOD = 2", "train_script.train.stats_period = 3", DROPOUT, "models.T5Config.num_decoder_layers = 1")
EACH = (*EACH, "train_script.train.train_eval_dataset_cfg = None")


def measured(model_dir):
    rows = [json.loads(line) for line in open(f"{model_dir}/metrics.jsonl", encoding="utf-8")]
    return {row["step"]: row for row in rows if "per_example/snr/all" in row}


def test_a_run_is_measured_at_its_steps_and_resumes_exactly(tmp_path, capfd):
    """MicroAdam with a monitor, killed and resumed: parameters, optimizer state and averages bit for bit."""
    _, whole = tiny.train(tmp_path / "whole", "TRAIN_STEPS = 8", *EACH, files=FILES)
    tiny.train(tmp_path / "parts", "TRAIN_STEPS = 5", *EACH, files=FILES)
    _, resumed = tiny.train(tmp_path / "parts", "TRAIN_STEPS = 8", *EACH, files=FILES)
    assert_same(whole, resumed)
    assert whole.monitor["trace"]["all"] > 0
    rows = measured(tmp_path / "whole")
    assert list(rows) == [2, 4, 6, 8]
    assert {step: row for step, row in measured(tmp_path / "parts").items()}.keys() == rows.keys()
    for step, row in measured(tmp_path / "parts").items():
        for name, value in row.items():
            assert not name.startswith("per_example/") or value == rows[step][name], (step, name)
    assert "loss" in rows[6] and "loss" not in rows[4]  # on a log step in the same line
    assert rows[6]["per_example/non_finite_examples"] == 0
    assert "snr" in capfd.readouterr().err  # beside the loss


@pytest.mark.slow
def test_switching_monitoring_on_and_off_at_a_checkpoint(tmp_path):
    off = "trainer.Trainer.monitor = None"
    _, whole = tiny.train(tmp_path / "whole", "TRAIN_STEPS = 6", *EACH, off, files=FILES)
    tiny.train(tmp_path / "run", "TRAIN_STEPS = 2", *EACH, off, files=FILES)
    _, on = tiny.train(tmp_path / "run", "TRAIN_STEPS = 4", *EACH, files=FILES)
    assert list(measured(tmp_path / "run")) == [4]
    assert on.monitor["trace"]["all"] > 0  # started again
    _, again = tiny.train(tmp_path / "run", "TRAIN_STEPS = 6", *EACH, off, files=FILES)
    assert again.monitor is None
    assert_same(whole, again)
