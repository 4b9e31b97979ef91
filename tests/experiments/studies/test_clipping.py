"""The study of clipping: its stages, what its analysis says of made-up runs, its data, its optimizer."""

import dataclasses
import io
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers
from perex_t5x.experiments import studies
from perex_t5x.experiments.report.load import LoadedRun, load_folders
from perex_t5x.experiments.studies import base, clipping
from perex_t5x.experiments.sweep import Sweep
from tests.experiments.report import support as report_support
from tests.experiments.studies.support import played
from tests.experiments.sweep.support import BINDINGS

BATCH, EXAMPLES = "clipping.batch_clipped.max_norm", "trainer.Trainer.clip_norm"


def test_every_clipping_is_run_at_multiples_of_the_best_rate_without_it():
    sweep = Sweep("clipping", files={"optimizer": ["a.gin", "b.gin"]}, grid={BATCH: [None, 0.5], EXAMPLES: [None, 2.0]},
                  rate_factors=[1.0, 2.0, 4.0], seeds=[0, 1, 2])  # fmt: skip
    best = {"a.gin": 2.0, "b.gin": 8.0}
    stages, runs = played(
        clipping.stages(sweep, 4),
        lambda v: 2 + abs(math.log2(v["rate_factor"] / best[v["optimizer"]])) + 0.01 * v["seed"],
    )
    assert not any(part.grid[BATCH] == [0.5] or part.grid[EXAMPLES] == [2.0] for part in stages[0]), "tuned unclipped"
    found = {(v["optimizer"], v[BATCH], v[EXAMPLES]): set() for v in runs}
    for values in runs:
        if values["seed"] == 2:  # of the last stage alone
            found[values["optimizer"], values[BATCH], values[EXAMPLES]].add(values["rate_factor"])
    beyond = {name: {factor * rate for factor in (1, 2, 4, 8)} for name, rate in best.items()}
    expected = {}
    for name, rate in best.items():
        expected[name, None, None] = beyond[name]
        expected[name, 0.5, None] = expected[name, None, 2.0] = beyond[name] | {rate / 2}
    assert found == expected, "not both kinds at once"


def write(folder, shift, *, diverging=(), optimizers_=("adamw", "micro_adam")):
    """Runs on text whose loss beyond the best rate (0.004) rises by `shift(optimizer, clipping, factor)`."""
    runs = []
    for name in optimizers_:
        for kind, norms in (("", (None, None)), ("batch", (0.5, None)), ("examples", (None, 2.0))):
            for factor in (0.5, 1.0, 2.0, 4.0, 8.0):
                for seed in (0, 1, 2):
                    values = {"optimizer": f"optimizers/{name}.gin", BATCH: norms[0], EXAMPLES: norms[1]}
                    runs.append({
                        "values": {**values, "rate_factor": factor, "seed": seed}, "optimizer": name, "seed": seed,
                        "rate": 0.004 * factor, "shift": shift(name, kind, factor), "noise": 0.001,
                        "diverge_at": 50 if (name, kind, factor) in diverging else None,
                    })  # fmt: skip
    report_support.write_sweep(str(folder), runs, name="clipping")
    (loaded,) = load_folders([str(folder)])
    return studies.find("clipping").analyse(loaded, str(folder))


def test_stability_and_order_are_read_off(tmp_path):
    def shift(name, kind, factor):
        behind = 0.1 if name == "micro_adam" else 0.0
        rise = 0.2 * abs(math.log2(factor))
        return behind + (rise / 2 if (name, kind) == ("micro_adam", "batch") else rise)

    stability, behind, rates = write(tmp_path, shift, diverging=[("micro_adam", "", 8.0)])
    assert "Lower with clipping: micro_adam on text, batch at 0.5" in stability["text"]
    # With examples clipped it does not diverge: 5.545 at 8 times the rate has become 2.7.
    assert "micro_adam on text, examples at 2" in stability["text"].split("higher")[0].split("not apart")[0]
    assert "not apart: adamw on text" in stability["text"]
    rows = {tuple(row[:3]): row[3:] for row in stability["table"]["rows"]}
    lost = stability["table"]["columns"].index("share lost") - 3
    assert rows["text", "micro_adam", "none"][lost] == pytest.approx(1 / 3, abs=0.01)
    assert rows["text", "micro_adam", "none"][lost - 1] == pytest.approx(clipping.GUESSING, abs=0.001)
    assert rows["text", "adamw", "batch at 0.5"][lost] == 0
    assert behind["text"].count("micro_adam on text") == 3 and "Behind: micro_adam" in behind["text"]
    assert rates["table"]["columns"][3:] == ["0.002", "0.004", "0.008", "0.016", "0.032"]


def test_what_is_missing_is_not_a_result(tmp_path):
    stopped = LoadedRun("a", seed=0, status="failed", error="No space left on device", values={"rate_factor": 2.0})
    diverged = dataclasses.replace(stopped, error="diverged at step 5: the loss is nan")
    assert not clipping.ended(stopped) and clipping.ended(diverged)
    assert clipping.beyond([dataclasses.replace(diverged, values={"rate_factor": f}) for f in (2.0, 4.0)], 1.0) == {}


def test_batch_clipping_in_front_of_an_optimizer():
    params, grads = jnp.zeros(2), jnp.array([3.0, 4.0])
    clipped = clipping.batch_clipped(0.1, optax.sgd, max_norm=1.0)
    np.testing.assert_allclose(clipped.update(grads, clipped.init(params), params)[0], [-0.06, -0.08], rtol=1e-6)
    plain = clipping.batch_clipped(0.1, optimizers.micro_adam)
    assert plain.needs == ("mean", "mean_square"), "as it is where there is no norm"


@pytest.mark.slow
def test_from_end_to_end(tmp_path):
    found = studies.find("clipping")
    data = "train/utils.DatasetConfig.mixture_or_task_name"
    sweep = dataclasses.replace(
        Sweep.load(found.file),
        files={"optimizer": ["optimizers/micro_adam.gin"]},
        grid={BATCH: [None, 0.25], data: ["python_stdlib_lm", "python_stdlib_outliers"]},
        rate_factors=[0.5, 1.0],
        seeds=[0, 1, 2],
        gin_bindings={},
    )
    results = base.run_stages(
        found, sweep, str(tmp_path), overview=io.StringIO(), extensions=0,
        gin_files=["models/tiny.gin", "runs/pretrain.gin", "sweeps/batch_clip.gin"],
        gin_bindings=[*BINDINGS, "TRAIN_STEPS = 4", "MIXTURE_OR_TASK_MODULE = 'perex_t5x.data.outliers'"],
    )  # fmt: skip
    assert {r.status for r in results} == {"done"}
    (loaded,) = load_folders([str(tmp_path)])
    stability, *_ = found.analyse(loaded, str(tmp_path))
    assert {tuple(row[:3]) for row in stability["table"]["rows"]} == {
        (data, "micro_adam", kind) for data in ("text", "outliers") for kind in ("none", "batch at 0.25")
    }
