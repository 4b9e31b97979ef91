"""Folders of sweeps and runs that something has happened to: the report reads what it can, or refuses in our words."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x.experiments import report
from perex_t5x.experiments.report import load
from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.goodput import Recorder
from tests import fuzzing
from tests.test_metric_files import LINES

CONFIG = """
BATCH_SIZE = 16
BASE_LEARNING_RATE = 0.008
OPTIMIZER = @optax.adamw
RANDOM_SEED = 0
TASK_FEATURE_LENGTHS = {'targets': 16}
TRAIN_STEPS = 4
train.train_eval_dataset_cfg = @utils.DatasetConfig()
"""
RUNS = [
    {
        "name": f"b{size}",
        "batch_size": size,
        "learning_rate": 0.01,
        "seed": 0,
        "values": {"batch_size": size},
        "bindings": [f"BATCH_SIZE = {size}"],
        "files": [],
        "steps": 4,
    }
    for size in (8, 16)
]
SWEEP = {
    "name": "sizes",
    "title": "Sizes",
    "question": "?",
    "rule": "sqrt",
    "base_batch_size": 16,
    "base_learning_rate": 0.01,
    "axes": {"batch_size": [8, 16]},
    "weight_decay": "kept",
    "gin_files": [],
    "gin_bindings": [],
    "runs": RUNS,
}
RESULT = {
    "name": "b8",
    "status": "done",
    "steps": 4,
    "eval_loss": 3.0,
    "best_eval_loss": 3.0,
    "seconds": 1.0,
    "error": "",
}


def write_sweep(root: Path) -> None:
    root.mkdir()
    (root / "sweep.json").write_text(json.dumps(SWEEP))
    (root / "findings.json").write_text(json.dumps([{"title": "Found", "text": "something"}]))
    (root / "results.csv").write_text("name,status,eval_loss,seconds\nb8,done,3.0,1.0\nb16,done,3.0,1.0\n")
    for run in RUNS:
        folder = root / "runs" / run["name"]
        (folder / "goodput").mkdir(parents=True)
        (folder / "config.gin").write_text(CONFIG)
        (folder / "metrics.jsonl").write_bytes(LINES)
        (folder / "result.json").write_text(json.dumps({**RESULT, "name": run["name"]}))
        (folder / "goodput" / "000000000000001.json").write_text(Recorder().attempt().to_json())


@contextlib.contextmanager
def sweep_folder(damages):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "sweep"
        write_sweep(root)
        for damage in damages:
            if any(root.iterdir()):
                fuzzing.damage_folder(root, damage)
        yield root


def check_loading(damages, draws: bool = False) -> None:
    with sweep_folder(damages) as root:

        def read():
            load.load_folders([str(root)])
            folder = Folder(str(root))
            folder.description()
            for run in RUNS:
                folder.result(run["name"])
            if draws:
                report.make([str(root)])

        fuzzing.refused(read)


def check_values(changes) -> None:
    """`changes`: (file, key, value) in JSON that is well-formed, and says odd things."""
    with sweep_folder([]) as root:
        for name, key, value in changes:
            path = root / name
            content = json.loads(path.read_text())
            inner = content
            if name == "sweep.json" and key in RUNS[0]:
                inner = content["runs"]
            inner = inner[0] if isinstance(inner, list) and inner else inner
            if isinstance(inner, dict):  # an earlier change may have left nothing to change
                inner[key] = value
            path.write_text(json.dumps(content))
        fuzzing.refused(lambda: report.make([str(root)]))


KEYS = {
    "sweep.json": [*SWEEP, *RUNS[0]],
    "findings.json": ["title", "text", "plots"],
    "runs/b8/result.json": list(RESULT),
    "runs/b8/goodput/000000000000001.json": list(json.loads(Recorder().attempt().to_json())),
}
JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([1e300, 10**400, -1, "x", "", "nan", "\ud800", "<b>", "../x"]),
    st.sampled_from([[], {}, [[]], [None], {"a": None}, {"": {}}, ["x"], [{}], [{"name": "b8"}]]),
)
CHANGES = st.sampled_from(sorted(KEYS)).flatmap(lambda f: st.tuples(st.just(f), st.sampled_from(KEYS[f]), JSON))


NOTHING = ("cut", 0.5, b"")


@example([("fifo", 0.0, NOTHING)])  # findings.json: waited for without end
@example([("fifo", 0.45, NOTHING)])  # metrics.jsonl of a run: the same
@example([("unreadable", 0.45, NOTHING)])
@fuzzing.few(40)
@given(damages=st.lists(fuzzing.DAMAGES, min_size=1, max_size=3))
def test_a_damaged_folder(damages):
    check_loading(damages)


@pytest.mark.slow
@fuzzing.many(2000)
@given(damages=st.lists(fuzzing.DAMAGES, min_size=1, max_size=3))
def test_many_damaged_folders(damages):
    check_loading(damages, draws=True)


@example([("runs/b8/goodput/000000000000001.json", "step", None)])
@example([("sweep.json", "values", 3)])
@example([("sweep.json", "bindings", 19)])
@example([("sweep.json", "name", "\ud800")])
@fuzzing.few(15)
@given(changes=st.lists(CHANGES, min_size=1, max_size=2))
def test_odd_values_in_well_formed_files(changes):
    check_values(changes)


@pytest.mark.slow
@fuzzing.many(2000)
@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
def test_many_odd_values_in_well_formed_files(changes):
    check_values(changes)
