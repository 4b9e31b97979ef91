"""Flags, environment and cluster: which process this is, and what is said when they do not fit."""

import pytest

from perex_t5x.distributed import process_info
from perex_t5x.errors import ConfigError, UnreachableError

NO_CLUSTER = (None, None, None, None)


def find(*flags, environ=None, cluster=NO_CLUSTER, **options):
    return process_info.find(*flags, environ=environ or {}, detect=lambda method, seconds: cluster, **options)


def test_alone():
    assert find() is None
    assert find(None, 1, None) is None
    assert find(cluster=("pod-0:8476", 1, 0, None)) is None
    assert find(cluster=("pod-0:8476", 4, 2, None), detection="off") is None


def test_flags():
    here = find("[::1]:1234", 2, 1)
    assert (here.host, here.port, here.count, here.index) == ("::1", 1234, 2, 1)


@pytest.mark.parametrize("count", ["JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"])
@pytest.mark.parametrize("index", ["JAX_PROCESS_ID", "JAX_PROCESS_INDEX"])
def test_environment(count, index):
    environ = {"JAX_COORDINATOR_ADDRESS": "a:1", count: "3", index: "2"}
    here = find(environ=environ)
    assert (here.address, here.count, here.index) == ("a:1", 3, 2)
    assert find(None, None, 0, environ=environ).index == 0  # a flag comes first


def test_attempt():
    assert find("a:1", 2, 1).attempt == ""
    assert find("a:1", 2, 1, environ={"PEREX_T5X_ATTEMPT": "3", "PEREX_T5X_JOB": "seed_1"}).attempt == "3/seed_1"
    assert find("a:1", 2, 1, environ={"PEREX_T5X_JOB": "seed_1"}).attempt == ""


def test_a_cluster_that_answers_late(monkeypatch):
    monkeypatch.setattr(process_info, "_PAUSE", 0.0)
    answers = [RuntimeError("no such name yet"), OSError("timed out"), ("pod-0:8476", 4, 2, None)]

    def detect(method, seconds):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert process_info.find(environ={}, detect=detect).index == 2


def test_cluster():
    here = find(cluster=("pod-0:8476", 4, 2, [0]))
    assert (here.address, here.count, here.index, here.local_device_ids) == ("pod-0:8476", 4, 2, [0])
    assert find("mine:1", cluster=("pod-0:8476", 4, 2, None)).address == "mine:1"


def test_slurm_is_detected_by_jax(monkeypatch):
    values = {"JOB_ID": "70", "STEP_NODELIST": "node[001-004]", "NTASKS": "4", "PROCID": "3", "LOCALID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    here = process_info.find(environ={})
    assert (here.address, here.count, here.index, here.source) == ("node001:61510", 4, 3, "the cluster")


@pytest.mark.parametrize(
    "flags,environ,message",
    [
        (("a:1", 2, 3), {}, r"--process_index = 3 with --process_count = 2: indices go from 0 to 1"),
        (("a:1", 2, -1), {}, r"--process_index = -1"),
        (("a:1", 0, 0), {}, r"--process_count = 0: there is at least one"),
        (("a:1", 2, None), {}, r"Given: --coordinator_address = a:1, --process_count = 2; missing: --process_index"),
        ((None, 2, 0), {}, r"missing: --coordinator_address \(or JAX_COORDINATOR_ADDRESS\)"),
        (("somewhere", 2, 0), {}, r"--coordinator_address = 'somewhere': write HOST:PORT"),
        (("a:99999", 2, 0), {}, r"write HOST:PORT"),
        (("a:1",), {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, r"JAX_NUM_PROCESSES = 'two' is not a whole"),
        (("a:1",), {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, r"JAX_PROCESS_ID = 2 with JAX_NUM_PROCESSES = 2"),
    ],
)
def test_slips_are_explained(flags, environ, message):
    with pytest.raises(ConfigError, match=message):
        find(*flags, environ=environ)


def test_a_cluster_that_cannot_be_asked():
    def detect(method, seconds):
        raise RuntimeError("403 - forbidden")

    with pytest.raises(UnreachableError, match=r"403 - forbidden.*--cluster_detection=off"):
        process_info.find(environ={}, detect=detect, timeout=0)

    def misses(method, seconds):
        raise KeyError("TPU_NAME")

    with pytest.raises(ConfigError, match=r"TPU_NAME.*--cluster_detection=off"):
        process_info.find(environ={}, detect=misses)
    with pytest.raises(ConfigError, match="--cluster_detection=mpi4py: JAX finds no such cluster"):
        find(detection="mpi4py")
