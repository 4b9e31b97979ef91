"""Two processes of 4 devices train as one of 8 does; either resumes what the other has saved, on another mesh."""

import fcntl
import json
import os
import shutil
import signal
import time

import numpy as np
import pytest

from perex_t5x import checkpoint_files, checkpoints, run_dir
from perex_t5x.errors import ConfigError
from perex_t5x.launching import local
from tests import tiny
from tests.distributed import support

RUN = (
    "train_script.train.stats_period = 1",
    "utils.SaveCheckpointConfig.period = 4",
    "DROPOUT_RATE = 0.1",
    "EVAL_PERIOD = 4",
    "models.T5Config.num_decoder_layers = 1",
)
OTHER_MESH = "partitioning.PjitPartitioner.num_partitions = 2"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Eight steps on the 8 devices of this process; made once for all workers of pytest-xdist."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    model_dir = shared / "one_process"
    with open(shared / "one_process.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "one_process.made").exists():
            tiny.train(model_dir, "TRAIN_STEPS = 8", *RUN)
            (shared / "one_process.made").touch()
    return model_dir


def two_processes(model_dir, *bindings, steps=8):
    status, output = support.run(*support.train_arguments(model_dir, f"TRAIN_STEPS = {steps}", *RUN, *bindings))
    assert status == 0, output
    return output


def evaluations(model_dir):
    with open(model_dir / "metrics.jsonl", encoding="utf-8") as f:
        rows = [row for row in map(json.loads, f) if row["name"].startswith("training_eval")]
    return {row["step"]: row["loss"] for row in rows}


def assert_same_losses(a, b):
    assert list(tiny.losses(a)) == list(tiny.losses(b))
    np.testing.assert_allclose(list(tiny.losses(a).values()), list(tiny.losses(b).values()), rtol=2e-6)


def only_up_to_step_4(model_dir, copy):
    """As if it had been killed after its checkpoint of step 4."""
    shutil.copytree(model_dir, copy)
    shutil.rmtree(copy / "checkpoint_8")
    return copy


def test_two_processes_are_one_and_one_resumes_what_two_have_saved(one_process, tmp_path):
    two = tmp_path / "two"
    output = two_processes(two)
    assert_same_losses(one_process, two)
    assert list(evaluations(two)) == [4, 8]
    np.testing.assert_allclose(list(evaluations(two).values()), list(evaluations(one_process).values()), rtol=2e-6)
    # Process 0 alone writes and speaks.
    assert "mesh replica 1 x data 8 x model 1 on 8 device(s) of 2 process(es)" in output
    assert not [line for line in output.splitlines() if line.startswith("[1]") and line[3:].strip()], output
    assert sorted(os.listdir(two)) == sorted([*os.listdir(one_process), "status.json"])  # that of a command

    resumed = only_up_to_step_4(two, tmp_path / "resumed")
    tiny.train(resumed, "TRAIN_STEPS = 8", *RUN, OTHER_MESH)
    assert_same_losses(one_process, resumed)


@pytest.mark.slow
def test_two_processes_resume_what_one_has_saved(one_process, tmp_path):
    resumed = only_up_to_step_4(one_process, tmp_path / "resumed")
    output = two_processes(resumed, OTHER_MESH)
    assert "checkpoint_4 (step 4)" in output and "data 4 x model 2" in output
    assert_same_losses(one_process, resumed)


@pytest.mark.slow
def test_two_processes_in_a_folder_that_is_damaged_and_in_use(one_process, tmp_path):
    """All start from the newest valid checkpoint, which process 0 finds; and all are refused while another run writes."""
    folder = shutil.copytree(one_process, tmp_path / "run")
    os.truncate(max((folder / "checkpoint_8").rglob("d/*"), key=os.path.getsize), 100)
    (folder / "checkpoint_6").mkdir()
    lock = run_dir.WriterLock(str(folder))
    lock.acquire()
    before = sorted(os.listdir(folder))
    status, output = support.run(*support.train_arguments(folder, "TRAIN_STEPS = 8", *RUN))
    assert status == 4 and f"another run writes there (process {os.getpid()} on" in output, output
    assert sorted(os.listdir(folder)) == before
    lock.release()
    output = two_processes(folder)
    assert output.count("4 steps are lost") == 1 and "checkpoint_4 (step 4)" in output
    assert_same_losses(one_process, folder)
    names = {name for name in os.listdir(folder) if name.startswith(("checkpoint", ".writer"))}
    assert names == {"checkpoint_4", "checkpoint_8", "checkpoint_8.damaged"}
    assert [checkpoint_files.verify(str(folder / f"checkpoint_{step}"))[0] for step in (4, 8)] == ["valid"] * 2


def interrupt_after_step(process, model_dir, step, number):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if max(tiny.losses(model_dir), default=0) >= step:
                process.send_signal(number)
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.05)


def test_ctrl_c_saves_all_processes_at_one_step(tmp_path):
    short = ("models.T5Config.num_decoder_layers = 1", "train_script.train.train_eval_dataset_cfg = None")
    arguments = support.train_arguments(tmp_path, "TRAIN_STEPS = 100000", RUN[0], *short)
    process = support.launch(*arguments)
    interrupt_after_step(process, tmp_path, 3, signal.SIGINT)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 130, output
    stopped = checkpoints.step_of(checkpoints.newest(str(tmp_path)))
    farewell = f"Stopped at step {stopped} of 100000; checkpoint_{stopped} is saved"
    assert output.count(farewell) == 1 and f"[0] {farewell}" in output and "ERROR" not in output
    assert max(tiny.losses(tmp_path)) == stopped  # not a step more, in the log either
    assert checkpoints.read_run(checkpoints.newest(str(tmp_path)))["data"]["step"] == stopped


@pytest.mark.slow
def test_asked_to_stop_around_an_evaluation_all_leave_it_and_make_up_for_it(tmp_path):
    """Every step is evaluated, so the signal comes before, in or after one: each is there once in the end."""
    bindings = ("EVAL_PERIOD = 1", "models.T5Config.num_decoder_layers = 1", RUN[0])
    process = support.launch(*support.train_arguments(tmp_path, "TRAIN_STEPS = 100000", *bindings))
    interrupt_after_step(process, tmp_path, 3, signal.SIGTERM)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 130, output
    stopped = checkpoints.step_of(checkpoints.newest(str(tmp_path)))
    status, output = support.run(*support.train_arguments(tmp_path, f"TRAIN_STEPS = {stopped + 1}", *bindings))
    assert status == 0, output
    with open(tmp_path / "metrics.jsonl", encoding="utf-8") as f:
        steps = [row["step"] for row in map(json.loads, f) if row["name"].startswith("training_eval")]
    assert steps == list(range(1, stopped + 2))


def test_a_process_that_is_configured_otherwise(tmp_path):
    """Both processes stop with status 2, and say what differs in which."""
    port = local.free_port()
    processes = []
    for i in range(2):
        changes = ["BASE_LEARNING_RATE = 0.002", "train/utils.DatasetConfig.pack = False"] if i else []
        flags = [f"--coordinator_address=localhost:{port}", "--process_count=2", f"--process_index={i}"]
        arguments = support.train_arguments(tmp_path / "run", "TRAIN_STEPS = 4", *changes)
        processes.append(support.start_process("perex_t5x.train", *arguments, *flags))
    outputs = [p.communicate(timeout=100)[0] for p in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 2, output
        assert "the processes were not started with the same configuration" in output
        assert f"BASE_LEARNING_RATE: 0.001 in process 0 ({os.uname().nodename}); 0.002 in process 1" in output, output
        assert "train/utils.DatasetConfig.pack: True in process 0" in output
        assert "TRAIN_STEPS" not in output.split("They differ in")[1]
    assert not (tmp_path / "run").exists()


STREAMED = (
    "train/utils.DatasetConfig.feed = 'streaming'",
    "train_eval/utils.DatasetConfig.feed = 'streaming'",
    "models.T5Config.num_heads = 8",
    "models.T5Config.head_dim = 4",
)


@pytest.mark.slow
def test_streamed_data(tmp_path):
    """Where all hosts hold the same rows they read the same stream, and so does one process."""
    model_axis = "partitioning.PjitPartitioner.num_partitions = 8"
    two_processes(tmp_path / "two", *STREAMED, model_axis)
    tiny.train(tmp_path / "one", "TRAIN_STEPS = 8", *RUN, *STREAMED, model_axis)
    assert_same_losses(tmp_path / "one", tmp_path / "two")
    assert evaluations(tmp_path / "one").keys() == evaluations(tmp_path / "two").keys()


@pytest.mark.slow
def test_a_divided_stream_is_resumed_by_as_many(tmp_path):
    whole = tmp_path / "whole"
    two_processes(whole, *STREAMED)
    resumed = only_up_to_step_4(whole, tmp_path / "resumed")
    refused = only_up_to_step_4(whole, tmp_path / "refused")
    two_processes(resumed, *STREAMED)
    assert tiny.losses(resumed) == tiny.losses(whole)
    with pytest.raises(ConfigError, match="saved by 2 processes and this run has 1"):
        tiny.train(refused, "TRAIN_STEPS = 8", *RUN, *STREAMED)


@pytest.mark.slow
def test_evaluation_and_inference(one_process, tmp_path):
    """Two processes score and predict what one does; one file each, written once."""
    results = {}
    for processes, devices in ((2, 4), (1, 8)):
        folder = tmp_path / str(processes)
        for module, file, output in (
            ("perex_t5x.eval", "runs/eval.gin", "EVAL_OUTPUT_DIR"),
            ("perex_t5x.infer", "runs/infer.gin", "INFER_OUTPUT_DIR"),
        ):
            bindings = [b for b in tiny.BINDINGS if b.split()[0] in USED_BY_EVALUATION] + [
                "models.T5Config.num_decoder_layers = 1",
                f"CHECKPOINT_PATH = '{one_process}/checkpoint_8'",
                f"{output} = '{folder}'",
            ]
            arguments = ["--gin_file=models/tiny.gin", f"--gin_file={file}", *(f"--gin_bindings={b}" for b in bindings)]
            status, printed = support.run(*arguments, module=module, processes=processes, devices=devices)
            assert status == 0, printed
        results[processes] = {
            name: (folder / name).read_text() for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")
        }
    assert results[1].keys() == results[2].keys() and len(results[1]) >= 2
    for name in results[1]:
        one, two = ([json.loads(line) for line in results[n][name].splitlines()] for n in (1, 2))
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                assert a[key] == (pytest.approx(b[key], rel=1e-4) if isinstance(b[key], float) else b[key])


USED_BY_EVALUATION = {
    "models.T5Config.emb_dim",
    "models.T5Config.num_heads",
    "models.T5Config.head_dim",
    "models.T5Config.mlp_dim",
    "MIXTURE_OR_TASK_NAME",
    "MIXTURE_OR_TASK_MODULE",
    "TASK_FEATURE_LENGTHS",
    "BATCH_SIZE",
}
