"""Whole runs: outputs, exact resume, starting from other checkpoints, and what goes wrong."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from perex_t5x import checkpoints, loop, metric_files, saving
from perex_t5x.cli.progress import Progress
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.goodput import Recorder
from perex_t5x.profiling import Profiler
from tests import tiny

EVERY_STEP = "train_script.train.stats_period = 1"
SAVE_AT = "utils.SaveCheckpointConfig.period = {}"


def assert_same_state(a, b):
    """Bit for bit, every leaf: parameters, optimizer state, step, RNG."""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(a)]
    for path, x, y in zip(paths, jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=path)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Eight steps without a stop, with dropout and an evaluation."""
    model_dir = tmp_path_factory.mktemp("whole")
    save, write, stored = checkpoints.Checkpointer.save, metric_files._Lines.write, {}

    def saved(self, state, *rest):
        stored[int(state.step)] = [row["step"] for row in metric_files.read_rows(model_dir) if "loss" in row]
        save(self, state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints.Checkpointer, "save", saved)
        # As slow as can be: lines are written when somebody waits for them, and not before.
        patch.setattr(metric_files._Lines, "write", lambda self, now=False: write(self, now) if now else None)
        step, state = tiny.train(
            model_dir, "TRAIN_STEPS = 8", EVERY_STEP, SAVE_AT.format(4), "DROPOUT_RATE = 0.1", "EVAL_PERIOD = 4"
        )
    assert step == 8
    # All lines up to a checkpoint's step are stored before it is saved; the evaluation of step 4 comes after.
    assert stored == {4: [1, 2, 3, 4], 8: [1, 2, 3, 4, 4, 5, 6, 7, 8]}
    return model_dir, state


def rows(model_dir, name):
    with open(os.path.join(model_dir, "metrics.jsonl"), encoding="utf-8") as f:
        return [row for row in map(json.loads, f) if row["name"] == name]


def test_outputs(whole_run):
    model_dir, _ = whole_run
    assert {
        "config.gin",
        "model-info.txt",
        "metrics.jsonl",
        "checkpoint_4",
        "checkpoint_8",
        "train",
        "training_eval",
    } <= set(os.listdir(model_dir))
    assert os.listdir(model_dir / "training_eval") == [tiny.TASK]
    names = {
        "accuracy", "loss", "cross_ent_loss", "z_loss", "loss_per_nonpadding_target_token", "learning_rate/current",
        "timing/seconds", "timing/seqs_per_second", "timing/steps_per_second", "timing/target_tokens_per_second",
    }  # fmt: skip
    assert names <= set(rows(model_dir, "train")[-1])
    assert {"timing/compilation_seconds", "timing/init_or_restore_seconds"} <= set(rows(model_dir, "train")[0])
    assert [row["step"] for row in rows(model_dir, f"training_eval/{tiny.TASK}")] == [4, 8]
    info = (model_dir / "model-info.txt").read_text()
    assert "decoder/layers_0/mlp/wi_0/kernel" in info and "('embed', 'mlp')" in info and "parameters;" in info
    assert "TRAIN_STEPS = 8" in (model_dir / "config.gin").read_text()


def test_rate_in_the_log_is_the_schedule_of_the_step(whole_run):
    model_dir, _ = whole_run
    logged = [row["learning_rate/current"] for row in rows(model_dir, "train")[1:]]
    # Step n is made with the rate of step n - 1: a warm-up of 5 from 0 to 0.001, then rsqrt.
    expected = [max(1e-8, 0.001 * min(1, t / 5) * np.sqrt(5 / max(t, 5))) for t in range(8)]
    np.testing.assert_allclose(logged, expected, rtol=1e-5, atol=1e-9)


def test_stopped_and_resumed_equals_never_stopped(whole_run, tmp_path):
    model_dir, state = whole_run
    bindings = (EVERY_STEP, SAVE_AT.format(4), "DROPOUT_RATE = 0.1", "EVAL_PERIOD = 4")
    tiny.train(tmp_path, "TRAIN_STEPS = 5", *bindings)  # saves at 4 and at 5
    step, resumed = tiny.train(tmp_path, "TRAIN_STEPS = 8", *bindings)
    assert step == 8
    assert_same_state(state, resumed)
    assert tiny.losses(tmp_path) == tiny.losses(model_dir)
    kept = (tmp_path / "config.1.gin").read_text()
    assert "TRAIN_STEPS = 5" in kept  # what the run was started with is not lost


def test_resuming_a_streaming_feed_is_exact(tmp_path):
    bindings = (
        EVERY_STEP,
        "train/utils.DatasetConfig.feed = 'streaming'",
        "train_script.train.train_eval_dataset_cfg = None",
    )
    _, whole = tiny.train(tmp_path / "whole", "TRAIN_STEPS = 6", *bindings)
    tiny.train(tmp_path / "parts", "TRAIN_STEPS = 3", *bindings)
    _, resumed = tiny.train(tmp_path / "parts", "TRAIN_STEPS = 6", *bindings)
    assert tiny.losses(tmp_path / "whole") == tiny.losses(tmp_path / "parts")
    assert_same_state(whole, resumed)


def test_already_trained(whole_run, capfd):
    model_dir, state = whole_run
    step, again = tiny.train(model_dir, "TRAIN_STEPS = 8", "DROPOUT_RATE = 0.1")
    assert step == 8
    assert_same_state(state, again)


def test_other_data_is_refused_when_resuming(whole_run):
    model_dir, _ = whole_run
    with pytest.raises(ConfigError, match="BATCH_SIZE.*saved 16, now 32"):
        tiny.train(model_dir, "TRAIN_STEPS = 9", "BATCH_SIZE = 32")


DRY = "train_script.train.dry_run = True"


def finetune(model_dir, source, *bindings):
    return tiny.train(
        model_dir,
        f"INITIAL_CHECKPOINT_PATH = '{source}'",
        "TRAIN_STEPS = 9",
        EVERY_STEP,
        *bindings,
        files=("models/tiny.gin", "runs/finetune.gin"),
    )


def test_finetuning_starts_at_the_checkpoint(whole_run, tmp_path):
    model_dir, _ = whole_run
    step, _ = finetune(tmp_path, model_dir / "checkpoint_8")
    assert step == 9
    assert list(tiny.losses(tmp_path)) == [9]
    # The newest checkpoint of the run's own folder comes before INITIAL_CHECKPOINT_PATH.
    step, _ = finetune(tmp_path, model_dir / "checkpoint_4", "TRAIN_STEPS = 10")
    assert step == 10 and list(tiny.losses(tmp_path)) == [9, 10]


def test_relative_steps(whole_run, tmp_path):
    model_dir, _ = whole_run
    more = ("TRAIN_STEPS_RELATIVE = 2", SAVE_AT.format(1))
    step, _ = finetune(tmp_path, model_dir / "checkpoint_8", *more)
    assert step == 10
    shutil.rmtree(tmp_path / "checkpoint_10")  # as if it had been killed before its last checkpoint
    step, _ = finetune(tmp_path, model_dir / "checkpoint_8", *more)
    assert step == 10


def test_switching_the_optimizer(whole_run, tmp_path):
    model_dir, before = whole_run
    source = model_dir / "checkpoint_8"
    hint = r"assignment_map = \[\('.\*param_states.\*', None\)\]"
    with pytest.raises(ConfigError, match=f"does not have .* leaves.*{hint}"):
        finetune(tmp_path / "a", source, "OPTIMIZER = @optax.amsgrad")
    # Lion's state is a part of AdamW's by name; taking it over would be silent nonsense.
    with pytest.raises(ConfigError, match=f"written by another optimizer.*/nu/.*{hint}"):
        finetune(tmp_path / "a", source, "OPTIMIZER = @optax.lion")
    other = ("OPTIMIZER = @optax.sgd", "optax.sgd.momentum = 0.9", *tiny.RATE_0)
    skip = "utils.RestoreCheckpointConfig.assignment_map = [('.*param_states.*', None)]"
    step, state = finetune(tmp_path / "b", source, *other, skip)
    assert step == 9
    for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(x, y)  # at rate 0 the restored parameters stay


def test_what_a_restore_leaves_out_is_said(whole_run, tmp_path, caplog):
    """Parameters that the model has not; and a rule that concerns nothing is misspelt."""
    model_dir, _ = whole_run
    source, fresh = model_dir / "checkpoint_8", "('.*param_states.*', None)"
    rules = "utils.RestoreCheckpointConfig.assignment_map = [{}]"
    message = r"assignment_map: '\.\*relpos_bias\.\*' matches no leaf of this run.*whole name, such as 'target/decoder/"
    with pytest.raises(ConfigError, match=message):
        finetune(tmp_path / "a", source, rules.format(f"{fresh}, ('.*relpos_bias.*', None)"), DRY)
    one_layer = "models.T5Config.num_decoder_layers = 1"
    said = "parameters that the model has not; they are left out: target/decoder/layers_1/"
    for rule, expected in ((fresh, True), (f"{fresh}, ('.*layers_1.*', None)", False)):
        caplog.clear()
        finetune(tmp_path / "b", source, one_layer, rules.format(rule), DRY)
        assert (said in caplog.text) == expected
    caplog.clear()
    finetune(tmp_path / "c", source, DRY)
    assert "left out" not in caplog.text


def test_fallback_to_scratch_initialises_what_is_missing(whole_run, tmp_path):
    model_dir, _ = whole_run
    more = "models.T5Config.num_decoder_layers = 3"
    with pytest.raises(ConfigError, match="does not have.*layers_2"):
        finetune(tmp_path / "a", model_dir / "checkpoint_8", more)
    step, state = finetune(
        tmp_path / "b", model_dir / "checkpoint_8", more, "utils.RestoreCheckpointConfig.fallback_to_scratch = True"
    )
    assert step == 9 and "layers_2" in state.params["decoder"]


def test_other_shapes_are_named(whole_run, tmp_path):
    model_dir, _ = whole_run
    message = r"other shapes.*mlp/wi_0/kernel: checkpoint \(32, 64\), this run \(32, 128\)"
    with pytest.raises(ConfigError, match=message):
        finetune(tmp_path, model_dir / "checkpoint_8", "models.T5Config.mlp_dim = 128")


@pytest.mark.parametrize(
    "path,message",
    [("nowhere", "this path does not exist"), ("", "not a checkpoint. It holds checkpoint_4, checkpoint_8")],
)
def test_bad_initial_checkpoint(whole_run, tmp_path, path, message):
    model_dir, _ = whole_run
    with pytest.raises(ConfigError, match=message):
        finetune(tmp_path, model_dir / path)


def test_keep_only_the_newest(tmp_path):
    tiny.train(tmp_path, "TRAIN_STEPS = 4", SAVE_AT.format(1), "utils.SaveCheckpointConfig.keep = 2")
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith("checkpoint")) == ["checkpoint_3", "checkpoint_4"]


def test_a_half_written_checkpoint_does_not_count(whole_run, tmp_path):
    model_dir, _ = whole_run
    os.makedirs(tmp_path / "checkpoint_7.orbax-checkpoint-tmp" / "state")
    assert checkpoints.newest(str(tmp_path)) is None
    assert checkpoints.newest(str(model_dir)) == str(model_dir / "checkpoint_8")


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(whole_run, tmp_path, caplog):
    model_dir, state = whole_run
    damaged = shutil.copytree(model_dir, tmp_path / "run")
    array = max((damaged / "checkpoint_8").rglob("d/*"), key=os.path.getsize)
    content = bytearray(array.read_bytes())
    content[len(content) // 2] ^= 1  # a bit in the middle of the parameters, which nothing below notices
    array.write_bytes(content)
    with pytest.raises(ConfigError, match="checkpoint_8 is damaged: .*its content has changed.*checkpoint_4"):
        finetune(tmp_path / "other", damaged / "checkpoint_8")
    bindings = (EVERY_STEP, SAVE_AT.format(4), "DROPOUT_RATE = 0.1", "EVAL_PERIOD = 4")
    caplog.clear()
    step, again = tiny.train(damaged, "TRAIN_STEPS = 8", *bindings)
    assert step == 8 and sum("4 steps are lost" in record.getMessage() for record in caplog.records) == 1
    assert_same_state(state, again)
    assert tiny.losses(damaged) == tiny.losses(model_dir)
    assert {"checkpoint_4", "checkpoint_8", "checkpoint_8.damaged"} <= set(os.listdir(damaged))


def test_streaming_feed_of_a_run_that_starts_at_a_checkpoint(whole_run, tmp_path):
    model_dir, _ = whole_run
    streaming = ("train/utils.DatasetConfig.feed = 'streaming'", "train_script.train.train_eval_dataset_cfg = None")
    finetune(tmp_path, model_dir / "checkpoint_8", *streaming)
    step, _ = finetune(tmp_path, model_dir / "checkpoint_8", *streaming, "TRAIN_STEPS = 11")
    assert step == 11 and list(tiny.losses(tmp_path)) == [9, 10, 11]


def test_nothing_to_train_is_an_error_for_another_runs_checkpoint(whole_run, tmp_path):
    model_dir, _ = whole_run
    with pytest.raises(ConfigError, match="is at step 8, and TRAIN_STEPS = 5.*TRAIN_STEPS_RELATIVE"):
        finetune(tmp_path, model_dir / "checkpoint_8", "TRAIN_STEPS = 5")


def test_own_checkpoint_of_another_optimizer(whole_run):
    model_dir, _ = whole_run
    skip = "utils.RestoreCheckpointConfig.assignment_map = [('.*param_states.*', None)]"
    with pytest.raises(ConfigError, match="run's own checkpoint.*a new MODEL_DIR with RestoreCheckpointConfig.path"):
        tiny.train(model_dir, "TRAIN_STEPS = 9", "OPTIMIZER = @optax.sgd", "optax.sgd.momentum = 0.9", skip)


def test_a_signal_during_evaluation_saves_all_the_same(tmp_path, monkeypatch):
    from perex_t5x.evaluation import TrainEvaluator

    def evaluate(self, step, params, between_batches):
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(TrainEvaluator, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt, match="checkpoint_2 is saved"):
        tiny.train(tmp_path, "TRAIN_STEPS = 9", "EVAL_PERIOD = 2")
    assert checkpoints.newest(str(tmp_path)).endswith("checkpoint_2")


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    """The loss of a step is that before its update, so a finite loss does not tell."""
    constant = ("utils.create_learning_rate_scheduler.factors = 'constant'", "OPTIMIZER = @optax.sgd")
    with pytest.raises(TrainingError, match="parameters after step 1 are not finite.*no checkpoint.*learning"):
        tiny.train(tmp_path, "TRAIN_STEPS = 9", SAVE_AT.format(1), "BASE_LEARNING_RATE = 1e39", *constant)
    assert checkpoints.newest(str(tmp_path)) is None


@pytest.mark.parametrize("content", ["folder", b"\x00\xff\xfe\n" * 9 + b'5\n{"step": "x"}'])
def test_files_in_odd_states_are_no_end_of_a_run(whole_run, tmp_path, content):
    model_dir, state = whole_run
    odd = shutil.copytree(model_dir, tmp_path / "run")
    shutil.rmtree(odd / "checkpoint_8")
    for name in ("config.gin", "metrics.jsonl", "model-info.txt", "status.json"):
        (odd / name).unlink(missing_ok=True)
        (odd / name).mkdir() if content == "folder" else (odd / name).write_bytes(content)
    bindings = (EVERY_STEP, SAVE_AT.format(4), "DROPOUT_RATE = 0.1", "EVAL_PERIOD = 4")
    step, resumed = tiny.train(odd, "TRAIN_STEPS = 8", *bindings)
    assert step == 8
    assert_same_state(state, resumed)
    assert tiny.losses(odd) == {k: v for k, v in tiny.losses(model_dir).items() if k > 4}
    assert "TRAIN_STEPS = 8" in (odd / "config.gin").read_text()
    assert "parameters;" in (odd / "model-info.txt").read_text()


def test_non_finite_loss_stops_before_saving(tmp_path):
    with pytest.raises(TrainingError, match="the loss of step .* is (nan|inf).*learning"):
        tiny.train(
            tmp_path,
            "TRAIN_STEPS = 20",
            "BASE_LEARNING_RATE = 1e10",
            "WARMUP_STEPS = 1",
            "OPTIMIZER = @optax.sgd",
        )
    assert checkpoints.newest(str(tmp_path)) is None


def test_interrupt_saves_and_resumes(tmp_path):
    """Ctrl-C in the middle: a checkpoint of that step, a message that names it, and an exact continuation."""
    timer = threading.Thread(target=_interrupt_after_step, args=(tmp_path, 3), daemon=True)
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="Stopped at step .*The same command resumes"):
        tiny.train(tmp_path, "TRAIN_STEPS = 100000", EVERY_STEP)
    stopped = checkpoints.step_of(checkpoints.newest(str(tmp_path)))
    assert 3 <= stopped < 100000
    step, _ = tiny.train(tmp_path, f"TRAIN_STEPS = {stopped + 1}", EVERY_STEP)
    assert step == stopped + 1 and list(tiny.losses(tmp_path)) == list(range(1, stopped + 2))


def _interrupt_after_step(model_dir, step):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if max(tiny.losses(model_dir), default=0) >= step:
                os.kill(os.getpid(), signal.SIGINT)
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.05)


def test_full_disk_is_found_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(ConfigError, match="MODEL_DIR.* MB free, but one checkpoint"):
        tiny.train(tmp_path, "TRAIN_STEPS = 1")


def test_unwritable_model_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="MODEL_DIR = .* cannot be written"):
        tiny.train(tmp_path / "file" / "run", "TRAIN_STEPS = 1")


def test_failed_write_says_what_is_safe(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.ocp.CheckpointManager, "save", fail)
    monkeypatch.setattr(saving, "_LAST_WAITS", (0.0,))
    with pytest.raises(TrainingError, match="No space left on device.*Earlier checkpoints are complete"):
        tiny.train(tmp_path, "TRAIN_STEPS = 1")


@pytest.mark.parametrize(
    "bindings,message",
    [
        (
            ["TRAIN_STEPS = 0"],
            "TRAIN_STEPS = 0: give at least 1",
        ),
        (["TRAIN_STEPS = 1", "EVAL_PERIOD = -1"], "train.eval_period = -1"),
        (["TRAIN_STEPS = 1", "BATCH_SIZE = 12"], "DatasetConfig.batch_size = 12 .*8 data shards"),
        (["TRAIN_STEPS = 1", "trainer.Trainer.num_microbatches = 3"], "num_microbatches = 3"),
        (
            ["TRAIN_STEPS = 1", "partitioning.PjitPartitioner.num_partitions = 8"],
            "num_heads = 4 of the model is not divisible by 8",
        ),
        (["TRAIN_STEPS = 1", "MIXTURE_OR_TASK_NAME = 'uneven_document_lm'"], "Did you mean 'uneven_documents_lm'"),
        (["TRAIN_STEPS = 1", "TASK_FEATURE_LENGTHS = {'target': 16}"], "targets"),
        (
            ["TRAIN_STEPS = 1", "MIXTURE_OR_TASK_NAME = 'python_stdlib_lm'", "USE_CACHED_TASKS = True"],
            "USE_CACHED_TASKS",
        ),
        (["TRAIN_STEPS = 1", "train/utils.DatasetConfig.split = 'trian'"], "'trian'.*train, validation"),
        (
            ["TRAIN_STEPS = 1", "train_eval/utils.DatasetConfig.mixture_or_task_name = 'nosuch'"],
            "'nosuch' is not a registered",
        ),
        (["TRAIN_STEPS = 1", "train_eval/utils.DatasetConfig.split = 'nosuch'"], "'nosuch'.*train, validation"),
        (["TRAIN_STEPS = 1", "EVAL_STEPS = 0"], "train.eval_steps = 0"),
        (
            ["TRAIN_STEPS = 1", "MODEL_DIR = 2024"],
            r"train.model_dir = 2024 .*macro MODEL_DIR.*a text is quoted: .'2024'",
        ),
        (
            ["TRAIN_STEPS = 1", "models.T5Config.vocab_size = 128"],
            "vocabulary of 259, but the model's vocab_size is 128",
        ),
    ],
)
def test_bad_configuration_fails_before_the_first_compile(tmp_path, monkeypatch, bindings, message):
    from perex_t5x.trainer import Trainer

    monkeypatch.setattr(Trainer, "compiled_step", lambda *a: pytest.fail("compiled before the check"))
    with pytest.raises(ConfigError, match=message):
        tiny.train(tmp_path, *bindings)


@pytest.mark.slow
def test_a_trace_and_the_program_are_written(tmp_path):
    # In a process of its own: the profiler crashes where other tests have loaded the TPU compiler without a TPU.
    bindings = ("TRAIN_STEPS = 4", "train_script.train.profile_steps = (2, 3)", "train_script.train.dump_hlo = True")
    code = f"from tests import tiny; tiny.train({str(tmp_path)!r}, *{bindings!r})"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=600)
    traces = [f for _, _, files in os.walk(tmp_path / "profile") for f in files]
    assert any(f.endswith(".xplane.pb") for f in traces)
    assert "stablehlo." in (tmp_path / "hlo" / "step.stablehlo.mlir").read_text()
    assert (tmp_path / "hlo" / "step.optimized_hlo.txt").read_text().startswith("HloModule")


def test_loop_reads_metrics_one_step_late():
    """Step t is dispatched before the metrics of t - 1 are read."""
    events = []

    class Metrics(dict):
        pass

    class FakeLoop(loop.Loop):
        def __init__(self):
            self._pending = None
            self._last_step, self._profiler = 3, Profiler("", None)
            self._stop = self._evaluated = None
            self._evaluate_first, self._gc_period, self._ended = False, 0, None
            self._monitor_fn = self._learning_rates = None
            self._make_progress = functools.partial(Progress, enabled=False)
            self._trainer = type("T", (), {"partitioner": type("P", (), {"data_sharding": None}), "monitor": None})
            self._feed = type("F", (), {"element_spec": {}, "batch": lambda self, step, sharding: {}})()
            self._clock = loop._Stopwatch()
            self._checkpointer = type("C", (), {"settle": lambda self: True})()
            self._writer, self._recorder = type("W", (), {"put": None}), Recorder()
            self._step_fn = self.dispatch

        def dispatch(self, state, batch):
            events.append(f"dispatch {state.step + 1}")
            return type("S", (), {"step": state.step + 1})(), {}

        def _read_pending(self):
            if self._pending:
                events.append(f"read {self._pending[0]}")
                self._pending = None

        def _after_step(self, step, state, stopping, interrupts):
            pass

    FakeLoop()(type("S", (), {"step": 0})())
    assert events == ["dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2"]
