"""docs/your_own_model.md, executed: its files are written to a folder and trained from there, as a reader would."""

import functools
import json
import pathlib
import re
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import gin_utils, infer, optimizers
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.report import load
from perex_t5x.models import protocol
from perex_t5x.partitioning import PjitPartitioner, standard_logical_axis_rules
from perex_t5x.trainer import Trainer, example_keys
from perex_t5x.utils import DatasetConfig, RestoreCheckpointConfig

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "your_own_model.md"
MODULES = ("points_task", "points_model", "points_nnx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's files, on the path as if the reader worked in it."""
    blocks = re.findall(r"^```(?:python|gin)\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert {name for name, _ in blocks} == {*(f"{m}.py" for m in MODULES), "points.gin", "points_nnx.gin"}
    folder = tmp_path_factory.mktemp("own_model")
    for name, text in blocks:
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def train(folder, model_dir, gin_file, *bindings):
    from perex_t5x import train as train_script

    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)
    fixed = [f"MODEL_DIR = '{model_dir}'", "RANDOM_SEED = 0", "train/utils.DatasetConfig.seed = 0"]
    gin_utils.parse_gin_flags([str(folder)], [gin_file], [*fixed, *bindings])
    step, state = gin.get_configurable(train_script.train)()
    rows = [json.loads(line) for line in open(model_dir / "metrics.jsonl", encoding="utf-8")]
    return step, state, rows


@pytest.mark.parametrize("gin_file", ["points.gin", "points_nnx.gin"])
def test_the_page_trains(folder, tmp_path, gin_file):
    step, state, rows = train(folder, tmp_path, gin_file, "TRAIN_STEPS = 60", "EVAL_PERIOD = 30")
    assert step == 60
    last = [row for row in rows if row["name"] == "train" and "loss" in row][-1]
    valid = {row["step"]: row for row in rows if row["name"] == "training_eval/points"}
    assert valid[60]["loss"] < valid[30]["loss"] < 1.1 and valid[60]["accuracy"] > 0.7
    assert last["timing/seqs_per_second"] > 0 and last["per_example/non_finite_examples"] == 0
    assert not [name for name in {*last, *valid[60]} if "token" in name or "z_loss" in name or "flops" in name]
    loaded = load.read_run(str(tmp_path), "points")  # as the report reads it
    assert loaded.evaluation[1][-1] == valid[60]["loss"] and loaded.training[1][-1] == last["loss"]
    # MicroAdam's second moment is that of single examples: it needs their statistics.
    assert {"mu", "nu"} <= {
        str(getattr(k, "name", "")) for p, _ in jax.tree.leaves_with_path(state.opt_state) for k in p
    }


@pytest.mark.parametrize("gin_file", ["points.gin", "points_nnx.gin"])
def test_its_statistics_are_those_of_single_examples(folder, gin_file):
    """On two data shards with FSDP's rules, against one `jax.grad` per example."""
    import points_model
    import points_nnx

    cls = points_model.PointsModel if gin_file == "points.gin" else points_nnx.NnxPointsModel
    rules = standard_logical_axis_rules(parameter_partitioning_dims=2)
    model = cls(optimizers.micro_adam, width=8)
    trainer = Trainer(model, PjitPartitioner(devices=jax.devices()[:2], logical_axis_rules=rules), 0.01)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 2)).astype(np.float32), "label": rng.integers(0, 4, (8, 1)).astype(np.int32)}
    shapes = {name: x.shape for name, x in batch.items()}
    state = trainer.init_state(jax.random.key(0), shapes)
    gradient = jax.jit(trainer.gradient)(state, batch)
    keys = example_keys(state.rng, state.step, 8)
    normalizer = model.loss_normalizer(batch)

    def of_one(i):
        row = {name: x[i : i + 1] for name, x in batch.items()}
        return jax.grad(lambda p: 8 * model.loss_fn(p, row, keys[i : i + 1], normalizer)[0])(state.params)

    rows = jax.tree.map(lambda *x: np.stack(x), *(of_one(i) for i in range(8)))
    for name, phi in (("mean", lambda g: g), ("mean_square", np.square)):
        expected = jax.tree.map(lambda g, phi=phi: phi(g).mean(axis=0), rows)
        for a, b in zip(jax.tree.leaves(gradient.statistics[name]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_scores_of_its_examples(folder, tmp_path):
    """A further ability: the model scores, and `perex_t5x.infer` writes the scores of a checkpoint."""
    import points_model

    class ScoringModel(points_model.PointsModel):
        def score_batch(self, params, batch):
            logits, label = self.logits(params, batch["x"]), batch["label"][:, 0]
            return jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None] - 1, axis=-1)[:, 0]

    _, state, _ = train(folder, tmp_path / "run", "points.gin", "TRAIN_STEPS = 2")
    lengths = {"x": 2, "label": 1}
    (path,) = infer.infer(
        mode="score",
        model=ScoringModel(optimizers.micro_adam),
        dataset_cfg=DatasetConfig(
            "points", lengths, "validation", batch_size=8, shuffle=False, seed=0, module="points_task"
        ),
        partitioner=PjitPartitioner(devices=jax.devices()[:1]),
        restore_checkpoint_cfg=RestoreCheckpointConfig(str(tmp_path / "run")),
        output_dir=str(tmp_path / "scores"),
        num_examples=12,
        write_fn=functools.partial(infer.write_inferences_to_file, include_all_inputs=True),
    )
    rows = [json.loads(line) for line in open(path, encoding="utf-8")]
    inputs = [row["inputs"] for row in rows]
    batch = {name: np.array([x[name] for x in inputs], np.asarray(inputs[0][name]).dtype) for name in lengths}
    expected = ScoringModel(None).score_batch(jax.device_get(state.params), batch)
    np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=1e-4)
    assert len(rows) == 12


def test_what_a_model_lacks_is_named(folder, tmp_path):
    import points_model

    model = points_model.PointsModel(optimizers.micro_adam)
    assert protocol.has(model, protocol.Model) and not protocol.has(model, protocol.Scores)
    with pytest.raises(ConfigError, match=r"MODEL = PointsModel has no score_batch, which infer.mode = 'score' needs"):
        protocol.require(model, protocol.Scores, "infer.mode = 'score'")
    with pytest.raises(ConfigError, match="DatasetConfig.pack = True: this model's features cannot be packed"):
        train(folder, tmp_path, "points.gin", "TRAIN_STEPS = 1", "train/utils.DatasetConfig.pack = True")
