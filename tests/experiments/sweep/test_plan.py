"""From a description to runs; all that is wrong is said before the first run, at once."""

import json
import shlex

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import Sweep
from perex_t5x.experiments.sweep.directory import Folder
from tests.experiments.sweep.support import FILES, plan


def test_product_of_all_axes():
    made = plan(
        files=FILES[:2],
        grid={"optax.adamw.b2": [0.9, 0.99]},
        zipped=[{"Z_LOSS": 0.0, "DROPOUT_RATE": 0.1}, {"Z_LOSS": 0.1, "DROPOUT_RATE": 0.0}],
        learning_rates=[0.1, 0.2, 0.3],
        seeds=[0, 1],
    )
    assert len(made.runs) == len({run.name for run in made.runs}) == 2 * 2 * 3 * 2
    last = made.runs[-1]
    assert last.name == "b2-0.99_Z_LOSS-0.1_DROPOUT_RATE-0_lr0.3_s1"
    assert last.values == {
        "optax.adamw.b2": 0.99,
        "Z_LOSS": 0.1,
        "DROPOUT_RATE": 0.0,
        "learning_rate": 0.3,
        "seed": 1,
    }
    assert {"optax.adamw.b2 = 0.99", "RANDOM_SEED = 1", "train/utils.DatasetConfig.seed = 1"} <= {
        b.replace("train/DatasetConfig", "train/utils.DatasetConfig") for b in last.own_bindings
    }
    assert made.axes()["learning_rate"] == [0.1, 0.2, 0.3]


def test_files_have_their_own_base_rate():
    made = Sweep(
        "optimizers",
        files={"optimizer": ["optimizers/adamw.gin", "optimizers/micro_adam.gin"]},
        rate_factors=[0.5, 1.0],
    ).plan(FILES[:2], plan().bindings, check=False)
    assert [(run.name, run.learning_rate) for run in made.runs] == [
        ("adamw_x0.5_s0", 0.004),
        ("adamw_x1_s0", 0.008),
        ("micro_adam_x0.5_s0", 0.008),
        ("micro_adam_x1_s0", 0.016),
    ]


def test_runs_that_differ_in_rate_and_seed_share_a_group():
    made = plan(batch_sizes=[8, 16], learning_rates=[0.1, 0.2], seeds=[0, 1])
    assert len({run.group for run in made.runs}) == 2
    assert len({(run.group, run.batch_size) for run in made.runs}) == 2


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as e:
        plan(
            "Trainer.num_microbatches = 3",
            name="bad name",
            batch_sizes=[24, 16, 16],
            rule="sqt",
            grid={"optax.adamw.b3": [1], "optax.adamw.b2": [], "TRAIN_STEP": [1]},
            zipped=[{"Z_LOSS": 0.1}, {"DROPOUT_RATE": 0.1}],
            seeds=[0, "one"],
            learning_rates=0.1,
            check=True,
        )
    text = str(e.value)
    for part in (
        "problems:\n1. ",
        "name = 'bad name'",
        "Did you mean 'sqrt'?",
        "batch_sizes has 16 twice",
        "grid['optax.adamw.b2'] is empty",
        "doesn't have a parameter named 'b3'",
        "Did you mean 'TRAIN_STEPS'?",
        "zipped[1] has DROPOUT_RATE",
        "seeds has 'one'",
        "learning_rates = 0.1: give a list",
        "batch_size = 16 is not divisible by Trainer.num_microbatches = 3",
    ):
        assert part in text, text
    assert "Traceback" not in text and "In call to configurable" not in text


def test_wrong_kinds_are_problems_too():
    wrong = {
        "rule": 3,
        "base_learning_rate": "high",
        "base_batch_size": 0,
        "gin_bindings": 3,
        "seeds": None,
        "grid": [1],
    }
    with pytest.raises(ConfigError) as e:
        plan(batch_sizes=[16], zipped=[3], weight_decay_rule="kep", **wrong)
    for name in (*wrong, "zipped", "Did you mean 'keep'?"):
        assert name in str(e.value)
    with pytest.raises(ConfigError, match="rule is empty"):
        plan(rule=[])


def test_batch_size_that_the_mesh_cannot_take():
    with pytest.raises(ConfigError, match="batch_size = 20 .* not divisible by the 8 data shards"):
        plan(batch_sizes=[16, 20], check=True)


def test_value_of_the_wrong_kind():
    with pytest.raises(ConfigError, match="b2-high.*cannot be built|optax.adamw.b2"):
        plan(grid={"optax.adamw.b2": ["high"]}, check=True)


@pytest.mark.parametrize("name", ["learning_rate", "sqrt_lr"])
def test_shipped_sweep(name):
    sweep = Sweep.load(f"sweeps/{name}.gin", ["seeds = [5]"])
    made = sweep.plan(check=name == "learning_rate")
    assert sweep.name == name and {run.seed for run in made.runs} == {5}
    assert len({run.examples for run in made.runs}) == 1


def test_sweep_file_problems(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'batch_sizes'"):
        Sweep.load("sweeps/sqrt_lr.gin", ["batch_size = [8]"])
    with pytest.raises(ConfigError, match="Did you mean 'sweeps/sqrt_lr.gin'"):
        Sweep.load("sweeps/sqrt_l.gin")
    with pytest.raises(ConfigError, match="not a sweep's file"):
        Sweep.load("optimizers/adamw.gin")
    (tmp_path / "a.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom perex_t5x.experiments import sweep\nsweep.Sweep.seeds = [0]\n"
    )
    with pytest.raises(ConfigError, match="gives no name"):
        Sweep.load(str(tmp_path / "a.gin"))


def test_command_runs_the_same_configuration():
    run = plan(batch_sizes=[32]).runs[0]
    command = run.command("gs://bucket/x", "python")
    assert command[:3] == ["python", "-m", "perex_t5x.train"]
    assert "--gin_bindings=MODEL_DIR = 'gs://bucket/x/runs/b32_s0'" in command
    assert shlex.split(shlex.join(command)) == command


def test_folder_takes_more_values_and_refuses_another_meaning(tmp_path):
    folder = Folder(str(tmp_path))
    folder.write_description(plan(learning_rates=[0.1]))
    more = plan(learning_rates=[0.2, 0.4])
    assert folder.check(more) == []
    described = folder.write_description(more)
    assert [run["name"] for run in described] == ["lr0.2_s0", "lr0.4_s0", "lr0.1_s0"]
    assert json.loads((tmp_path / "sweep.json").read_text())["axes"]["learning_rate"] == [0.2, 0.4, 0.1]
    assert "over learning_rate, seed, not seed" in folder.check(plan())[0]
    assert "--gin.NAME was" in folder.check(plan("Z_LOSS = 0.5", learning_rates=[0.1]))[0]
    assert "'test'" in folder.check(plan(name="other", learning_rates=[0.1]))[0]
    other = Folder(str(tmp_path / "b"))
    other.write_description(plan(batch_sizes=[16, 32], rule="sqrt"))
    assert "its run b32_s0 is" in other.check(plan(batch_sizes=[32], rule="linear"))[0]


def test_one_sweep_at_a_time_in_a_folder(tmp_path):
    folder = Folder(str(tmp_path))
    with folder.locked():
        with pytest.raises(ConfigError, match="a sweep is running in this folder"):
            with Folder(str(tmp_path)).locked():
                pass
    with folder.locked():
        pass
