"""One of two real processes is killed, suspended, hangs or fails: the other stops in time and names it."""

import re
import time

import pytest

from perex_t5x import checkpoints
from perex_t5x.errors import Reason
from tests import tiny
from tests.distributed import support

WORKER = "tests.distributed.worker"
SILENT = r"ERROR: process {} \(.*\) has not answered for \d+ s: it was killed or suspended"
STILL = r"ERROR: process {} \(.*\) makes no progress: for \d+ s it has been reading the batch of step 20"


def run_worker(trouble, **options):
    """(output of the process that is well, seconds from the trouble to its message)."""
    # The launcher leaves the well process more time than that needs to miss the other, however busy the machine is. A
    # suspended one does not end by itself, so there it is short.
    grace = 20 if trouble.startswith("kill") else 3
    process = support.launch(module=WORKER, devices=2, grace=grace, TROUBLE=trouble, **options)
    lines, begun, took = [], None, None
    for line in process.stdout:
        lines.append(line)
        if "TROUBLE" in line:
            begun = time.monotonic()
        if "ERROR: process" in line and took is None and begun is not None:
            took = time.monotonic() - begun
    return process.wait(), "".join(lines), took


@pytest.mark.parametrize(
    "trouble,message,by",
    [
        ("kill in 1 at 20", SILENT.format(1), 0),
        pytest.param("suspend in 1 at 20", SILENT.format(1), 0, marks=pytest.mark.slow),
        pytest.param("suspend in 0 at 20", SILENT.format(0), 1, marks=pytest.mark.slow),
        ("hang in 1 at 20", STILL.format(1), 0),
        pytest.param("hang in 0 at 20", STILL.format(0), 1, marks=pytest.mark.slow),
        ("kill in 0 at 20", r"ERROR: process 0 \(.*\), the coordinator, has ended without a message", 1),
        ("error in 1 at 20", r"ERROR: process 1 \(.*\) stopped: OSError: the disk of the data is gone", 0),
        pytest.param(
            "error in 0 at 20",
            r"ERROR: process 0 \(.*\) stopped: OSError: the disk of the data is gone",
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_other_process_stops_and_says_why(trouble, message, by):
    status, output, took = run_worker(trouble)
    assert re.search(rf"\[{by}\] {message}", output), output
    assert took is not None and took < 25, output  # a timeout of 3 s, on a loaded machine
    expected = {"kill": 137, "error": Reason.ERROR.exit_code}.get(trouble.split()[0], Reason.PEER_LOST.exit_code)
    assert status == expected, output
    assert "DONE" not in output


def test_without_trouble_they_finish():
    status, output, _ = run_worker("none in 0 at 0", STEPS="30")
    assert status == 0 and output.count("DONE") == 1, output


def train_into_trouble(model_dir, trouble, *more):
    return support.run(
        *support.train_arguments(
            model_dir,
            "TRAIN_STEPS = 10000",
            "MIXTURE_OR_TASK_MODULE = 'tests.distributed.trouble'",
            "utils.SaveCheckpointConfig.period = 3",
            "train_script.train.stats_period = 1",
        ),
        "--heartbeat_timeout=5",
        *more,
        TROUBLE=trouble,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "suspend", "hang", "error"])
@pytest.mark.parametrize("where", [0, 1])
def test_training_with_a_process_that_fails(tmp_path, kind, where):
    status, output = train_into_trouble(tmp_path, f"{kind} in {where} at 8")
    assert re.search(rf"\[{1 - where}\] ERROR: process {where} \(", output), output
    assert status == {"kill": 137, "error": Reason.ERROR.exit_code}.get(kind, Reason.PEER_LOST.exit_code)
    # Whatever was being written, the newest whole checkpoint is restored by a single process.
    newest = checkpoints.newest(str(tmp_path))
    begin = 0 if newest is None else checkpoints.step_of(newest)
    assert begin in (0, 3, 6)
    tiny.train(tmp_path, "TRAIN_STEPS = 10", "train_script.train.stats_period = 1")
    assert list(tiny.losses(tmp_path)) == list(range(1, 11))


@pytest.mark.slow
def test_a_configuration_error_in_one_process_ends_both(tmp_path):
    """A file that only one host lacks."""
    arguments = support.train_arguments(tmp_path, "TRAIN_STEPS = 3", "MIXTURE_OR_TASK_NAME = 'nosuch'")
    status, output = support.run(*arguments)
    assert status == 2 and "'nosuch' is not a registered" in output
