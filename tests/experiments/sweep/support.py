"""Sweeps of the tests' tiny task, and what tests ask of them."""

import json
import sys

from perex_t5x.experiments.sweep import Sweep
from tests import tiny

FILES = ["models/tiny.gin", "runs/pretrain.gin", "optimizers/adamw.gin"]
BINDINGS = [
    *(b for b in tiny.BINDINGS if not b.startswith(("RANDOM_SEED", "train/utils.DatasetConfig.seed", "EVAL_PERIOD"))),
    "models.T5Config.num_decoder_layers = 1",
    "TRAIN_STEPS = 8",
    "EVAL_PERIOD = 4",
    "WARMUP_STEPS = 2",
]


def plan(*bindings, files=FILES, check=False, name="test", **description):
    return Sweep(name, **description).plan(files, [*BINDINGS, *bindings], check=check)


def rows(folder):
    """Step and values of every line of a run's metrics.jsonl, by name, without timing."""
    found = {}
    with open(f"{folder}/metrics.jsonl", encoding="utf-8") as f:
        for line in f:
            row = json.loads(line)
            values = {
                k: v for k, v in row.items() if not k.startswith(("timing/", "goodput/")) and k not in ("step", "name")
            }
            if values:
                found[row["name"], row["step"]] = values
    return found


def sweep_command(folder, *arguments):
    """`python -m perex_t5x.experiments.sweep` on the tiny task."""
    files = [f"--gin_file={f}" for f in FILES]
    bindings = [f"--gin_bindings={b}" for b in BINDINGS]
    sweep = ["--sweep=sweeps/learning_rate.gin", "--sweep.gin_bindings={}", f"--dir={folder}"]
    return [sys.executable, "-m", "perex_t5x.experiments.sweep", *sweep, *files, *bindings, *arguments]
