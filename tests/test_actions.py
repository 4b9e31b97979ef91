"""Actions end real runs: early stopping, NaN, the best checkpoints kept; and what is evaluated before training."""

import functools
import gc
import math

import pytest

from perex_t5x import checkpoints, loop, metric_files, trainer
from perex_t5x.actions import Actions
from perex_t5x.errors import ConfigError
from perex_t5x.utils import CheckpointConfig, SaveCheckpointConfig
from tests import tiny

SMALL = ("models.T5Config.num_decoder_layers = 1", "EVAL_STEPS = 1", "train_script.train.stats_period = 1")
WORSE = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 0.5}  # step -> what an evaluation gives: it stops improving at 2


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Runs the tiny model with given losses of evaluations."""
    import gin

    from perex_t5x import gin_utils
    from perex_t5x import train as train_script

    def run(*bindings, losses=WORSE, steps=5, **arguments):
        write = loop.Loop._write_evaluation

        def written(self, step, results):
            for metrics in results.values():
                metrics["loss"] = losses.get(step, metrics["loss"])
            write(self, step, results)

        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "_write_evaluation", written)
            tiny.configure(f"MODEL_DIR = '{tmp_path}'", f"TRAIN_STEPS = {steps}", "EVAL_PERIOD = 1", *SMALL, *bindings)
            gin.config._CONFIG_IS_LOCKED = False
            return gin_utils.call(train_script.train, **arguments)[0]

    return run


def evaluations(folder):
    return [row["step"] for row in metric_files.read_rows(folder) if row["name"].startswith("training_eval")]


def stopping(**changes):
    rules = {"metric": (tiny.TASK, "loss"), "mode": "min", "patience": 3} | changes
    return {"TRAIN_EVAL": [trainer.EarlyStoppingAction(**rules)]}


def test_early_stopping_ends_a_run_and_a_resumed_one(train, tmp_path):
    assert train(actions=stopping()) == 4  # 1.0, 2.0, 2.5
    assert checkpoints.newest(tmp_path).endswith("checkpoint_4") and evaluations(tmp_path) == [1, 2, 3, 4]
    assert train(actions=stopping()) == 4  # started again it ends at once
    assert evaluations(tmp_path) == [1, 2, 3, 4]
    assert train(actions=stopping(patience=5)) == 5


def test_the_history_is_that_of_the_whole_run(train, tmp_path):
    assert train(actions=stopping(), steps=3) == 3
    assert train(actions=stopping(), steps=5) == 4  # needs what was measured at 2 and 3


def test_terminate_on_nan(train, tmp_path):
    nan = {"TRAIN_EVAL": [trainer.TerminateOnNanAction(tiny.TASK)]}
    assert train(actions=nan, losses={2: math.nan}) == 2
    assert checkpoints.newest(tmp_path).endswith("checkpoint_2")


def test_actions_see_the_metrics_of_training(train):
    class Third(trainer.BaseAction):
        seen = []

        def run(self, train_state, metrics_by_task):
            Third.seen.append((int(train_state.step), metrics_by_task["train"]["loss"]))
            return len(Third.seen) == 3

    assert train("train_script.train.train_eval_dataset_cfg = None", actions={"TRAIN": [Third()]}) == 3
    assert [step for step, _ in Third.seen] == [1, 2, 3] and all(math.isfinite(loss) for _, loss in Third.seen)


def test_the_best_checkpoints_are_kept_as_t5x_says_it(train, tmp_path):
    best = functools.partial(
        checkpoints.SaveBestCheckpointer,
        f"training_eval/{tiny.TASK}/loss",
        "min",
        keep_checkpoints_without_metrics=False,
    )

    class Best(checkpoints.SaveBestCheckpointer):
        def __init__(self):
            vars(self).update(vars(best()))

    save = SaveCheckpointConfig(period=1, keep=1, checkpointer_cls=Best)
    assert (save.keep, save.keep_best, save.keep_best_mode) == (1, 1, "min")
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.6}
    train(checkpoint_cfg=CheckpointConfig(save=save), losses=losses)
    kept = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    assert kept == ["checkpoint_2", "checkpoint_5"]


def test_single_steps_are_saved_and_states_transformed(train, tmp_path):
    def without_state(state, infos):
        assert infos["target"] is not None
        return {**state, "state": {**state["state"], "param_states": {}}}, infos

    save = SaveCheckpointConfig(checkpoint_steps=[2], state_transformation_fns=[without_state])
    train(checkpoint_cfg=CheckpointConfig(save=save), steps=3)
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == ["checkpoint_2", "checkpoint_3"]
    with pytest.raises(ConfigError, match="param_states"):  # a run resumes from what is there
        train(checkpoint_cfg=CheckpointConfig(save=save), steps=4)


def test_an_evaluation_before_training_and_nothing_else(train, tmp_path):
    assert train(run_eval_before_training=True, eval_period=0, steps=2, gc_period=1) == 2
    assert evaluations(tmp_path) == [0] and gc.isenabled()


def test_an_evaluation_alone(train, tmp_path):
    assert train(run_eval_before_training=True, eval_period=0, total_steps=0) == 0
    assert evaluations(tmp_path) == [0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"actions": {"EVAL": []}}, "'EVAL' is none of TRAIN, TRAIN_EVAL, INFER_EVAL"),
        ({"actions": {"TRAIN": [3]}}, r"text or ActionMode.TRAIN or .*: list \(each a BaseAction"),
        ({"actions": stopping(metric=("uneven_documents", "loss"))}, "Did you mean 'uneven_documents_lm'"),
        ({"actions": {"INFER_EVAL": [trainer.TerminateOnNanAction("x")]}}, "would never run"),
        ({"total_steps": 0}, "TRAIN_STEPS = 0"),
        ({"get_dataset_fn": print}, "register a SeqIO task"),
    ],
)
def test_what_is_refused_before_anything_is_compiled(train, arguments, message):
    with pytest.raises(ConfigError, match=message):
        train(dry_run=True, **arguments)


def test_what_has_no_effect_is_said_in_a_line(train, caplog):
    with caplog.at_level("INFO", logger="absl"):
        train(dry_run=True, concurrent_metrics=False, use_orbax=False, verify_matching_vocabs_fn=None)
    assert [
        name for name in ("concurrent_metrics", "use_orbax") if f"train.{name} = False is ignored" in caplog.text
    ] == [
        "concurrent_metrics",
        "use_orbax",
    ]


def test_actions_are_copies():
    action = trainer.EarlyStoppingAction(("t", "loss"), "max", patience=2)
    one, other = Actions({"TRAIN_EVAL": [action]}), Actions({"TRAIN_EVAL": [action]})
    results = {"training_eval/t": {"loss": 1.0}}
    assert not one.run_evaluation(None, results) and one.run_evaluation(None, results)
    assert not other.run_evaluation(None, results)
