"""launch/gcloud_tpu.py where gcloud, the network or a person gets in the way; see test_launching_gcloud.py."""

import re
import subprocess
from types import SimpleNamespace as Namespace

import pytest
from gcloud_support import Cloud, finished, killed_workers, scenario, there

from perex_t5x.launching.accelerators import Slice
from perex_t5x.launching.gcloud import resource, steps


@pytest.fixture
def cloud(tmp_path):
    yield Cloud(tmp_path)
    killed_workers(tmp_path)


def test_deleted_by_hand_is_not_made_anew(cloud):
    cloud.work(cloud.job("a", "time.sleep(60)"))
    process = cloud.start()
    cloud.wait_for(lambda: len(cloud.ran) == 2)
    assert cloud.command("delete", "--name=run").status == 0
    done = finished(process)
    assert done.status == 130 and "was deleted, and not by this launch" in done.last
    assert cloud.verbs.count("create") == 1 and cloud.resources == {}


@pytest.mark.slow
def test_a_node_is_preempted_before_its_resource_says_so(cloud):
    scenario(cloud, states=["ACTIVE"], preempt_node_at_ssh=2)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert "taken away before the program ran" in done.err and cloud.verbs.count("create") == 2
    assert sorted(cloud.ran) == ["a0", "a1"] and cloud.resources == {}


def test_no_answer_is_not_taken_for_a_preemption(cloud):
    scenario(cloud, states=["ACTIVE"], ssh_fails={"worker": 0, "numbers": [4]}, node_errors=4)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert "run cannot be looked at" in done.err and "has no way to the cloud" in done.err
    assert cloud.verbs.count("create") == 1 and sorted(cloud.ran) == ["a0", "a1"]


def test_the_answer_to_create_is_lost(cloud):
    scenario(cloud, states=["ACTIVE"], answer_lost=True)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert sum("create" in argv for argv in cloud.commands) == 2 and sorted(cloud.ran) == ["a0", "a1"]
    assert cloud.resources == {}


def test_numbers_in_names_and_limits_are_no_passing_failures():
    passing = re.compile(steps._PASSING[0])
    assert not passing.search("NOT_FOUND: Resource 'projects/p-503/queuedResources/lr-500' was not found")
    assert not passing.search("Quota limit exceeded. Limit: 500 in zone x")
    assert passing.search("HTTPError 503: try again") and passing.search("502 Bad Gateway")


@pytest.mark.parametrize("step", ["install", "start", "status", "wait"])
def test_a_step_that_fails_alone_names_what_is_there(cloud, step):
    there(cloud, states=["PROVISIONING", "FAILED"] if step == "wait" else ["ACTIVE"])
    scenario(cloud, ssh_fails={"worker": 1}, failed="no more capacity")
    done = cloud.command(step, "--name=run")
    assert done.status == 1 and done.last.startswith("still there: queued resource run"), done.err
    assert list(cloud.resources) == ["run"]


def test_an_install_that_was_interrupted_is_mended(cloud):
    there(cloud)
    folder = cloud.folder / "hosts/run/0/perex/run"
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "bundle.tar.gz").write_text("")
    (folder / "venv/bin/python").write_text("#!/bin/sh\necho No module named pip >&2; exit 1\n")
    (folder / "venv/bin/python").chmod(0o755)
    scenario(cloud, workers=1)
    done = cloud.command("install", "--name=run")
    assert done.status == 0, done.err
    assert "install" in (folder / "pip.txt").read_text() and (folder / "installed").exists()


def test_shapes_of_later_chips_are_asked_for_with_alpha(cloud):
    for name, topology, words in (("a", "v4:4x4x12", []), ("b", "v5p:4x4x12", ["alpha"])):
        request = Namespace(slice=Slice.of(topology), work=Namespace(fingerprint="0"), spot=True, reservation=None)
        argv = resource.Resource(name, "my-project", "us-west4-a").create(request, "0")
        assert argv[1 : 1 + len(words)] == words and "--topology=4x4x12" in argv
        done = subprocess.run(argv, env=cloud.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
