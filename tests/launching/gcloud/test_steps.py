"""launch/gcloud_tpu.py where gcloud, the network or a person gets in the way; see test_command.py."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace as Namespace

import pytest

from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import checks, shell
from perex_t5x.launching.gcloud import remote, resource, steps
from perex_t5x.launching.gcloud.remote import HostStatus
from perex_t5x.launching.shell import Commands
from tests.launching.gcloud.support import Cloud, created, finished, killed_workers, scenario, there


@pytest.fixture
def cloud(tmp_path):
    yield Cloud(tmp_path)
    killed_workers(tmp_path)


@pytest.mark.slow
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
    assert "preempted before the program ran" in done.err and cloud.verbs.count("create") == 2
    assert sorted(cloud.ran) == ["a0", "a1"] and cloud.resources == {}


def test_no_answer_is_not_taken_for_a_preemption(cloud):
    scenario(cloud, states=["ACTIVE"], ssh_fails={"worker": 0, "numbers": [4]}, node_errors=4)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert "run cannot be described" in done.err and "cannot reach the cloud" in done.err
    assert cloud.verbs.count("create") == 1 and sorted(cloud.ran) == ["a0", "a1"]


def test_the_answer_to_create_is_lost(cloud):
    scenario(cloud, states=["ACTIVE"], answer_lost=True)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert sum("create" in argv for argv in cloud.commands) == 2 and sorted(cloud.ran) == ["a0", "a1"]
    assert cloud.resources == {}


def test_numbers_in_names_and_limits_are_no_transient_failures():
    transient = re.compile(shell.GCLOUD_TRANSIENT)
    assert not transient.search("NOT_FOUND: Resource 'projects/p-503/queuedResources/lr-500' was not found")
    assert not transient.search("Quota limit exceeded. Limit: 500 in zone x")
    assert transient.search("HTTPError 503: try again") and transient.search("502 Bad Gateway")


@pytest.mark.parametrize("step", ["install", "start", "status", "wait"])
def test_a_step_that_fails_alone_names_what_is_there(cloud, step):
    there(cloud, states=["PROVISIONING", "FAILED"] if step == "wait" else ["ACTIVE"])
    scenario(cloud, ssh_fails={"worker": 1}, failed="no more capacity")
    done = cloud.command(step, "--name=run")
    assert done.status == 1 and done.last.startswith("still there: queued resource run"), done.err
    assert list(cloud.resources) == ["run"]


def test_an_install_that_was_interrupted_is_repeated(cloud):
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


@pytest.mark.parametrize(
    "values,words",
    [
        ({"quota": 8}, "note: the quota TPUV5sLitepodPerProjectPerZoneForTPUAPI is 8 in us-west4-a, and 16 chips"),
        ({"quota": 16}, ""),
        ({"quota": -1}, ""),  # no limit
        ({"quota": 8, "quota_zone": "us-west4-b"}, ""),
        ({}, "cannot be read (ERROR: (gcloud.beta.quotas.info.describe) PERMISSION_DENIED"),
    ],
)
def test_the_quota_is_looked_at_and_refuses_nothing(cloud, capsys, monkeypatch, values, words):
    scenario(cloud, **values)
    for name in ("PATH", "STANDIN_DIR"):
        monkeypatch.setenv(name, cloud.environment[name])
    request = Namespace(slice=Slice.of("v5e-16"), slices=1, spot=False, reservation=None, reserved=False)
    request.project, request.zone = "my-project", "us-west4-a"
    checks.quota(request, Commands())
    said = capsys.readouterr().err
    assert (words in said) if words else said == ""
    checks.quota(Namespace(reservation=None, reserved=True), Commands())


@pytest.mark.parametrize(
    "flag,words", [("--labels=a=b", "is set by the launch itself"), ("network=n", "is not a gcloud flag")]
)
def test_flags_for_create_do_not_undo_those_of_the_launch(cloud, flag, words):
    done = cloud.command("list", f"--create_flag={flag}")
    assert done.status == 2 and words in done.err


def test_a_host_s_last_words_on_a_terminal_that_knows_ascii_alone(cloud):
    there(cloud)
    scenario(cloud, workers=1)
    folder = cloud.folder / "hosts/run/0/perex/run"
    folder.mkdir(parents=True)
    (folder / "worker.log").write_bytes(b"\xff step \xe2\x82\xac")
    cloud.environment["PYTHONIOENCODING"] = "ascii"
    done = cloud.command("status", "--name=run")
    assert done.status == 0 and "not started: \\ufffd step \\u20ac" in done.out


@pytest.mark.parametrize(
    "files,expected",
    [
        (None, (remote.ABSENT, None, "")),
        ({"worker.log": b"copied"}, (remote.UNSTARTED, None, "copied")),
        ({"starter.pid": b"999999999"}, (remote.LOST, None, "")),
        ({"starter.pid": b"999999999", "exit_status": b"7\n"}, (remote.ENDED, 7, "")),
        ({"starter.pid": b"999999999", "exit_status": b""}, (remote.ENDED, 1, "")),  # a full disk
        ({"worker.log": b'a\n{"perex_host": \xff"}\n'}, (remote.UNSTARTED, None, '{"perex_host": \ufffd"}')),
    ],
)
def test_hosts_report_their_state_as_json(tmp_path, files, expected):
    if files is not None:
        (tmp_path / "perex" / "run").mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / "perex" / "run" / name).write_bytes(content)
    environment = {**os.environ, "HOME": str(tmp_path), "HOSTNAME": "t1v-n-w-3"}
    done = subprocess.run(["bash", "-c", remote.status("run")], env=environment, capture_output=True, text=True)
    [line] = done.stdout.splitlines()
    assert json.loads(line)["perex_host"] == "t1v-n-w-3" and done.stderr == ""
    assert HostStatus.parse(line) == HostStatus("t1v-n-w-3", *expected)


@pytest.mark.slow
def test_another_launch_began_during_the_checks(cloud):
    scenario(cloud, appears_at_describe=2, appears=created())
    cloud.work(cloud.job("a", ""))
    done = cloud.launch(yes=False)
    assert done.status == 2 and "Nothing was created" in done.err  # no terminal
    (cloud.folder / "state.json").unlink()
    done = cloud.launch(keep=True)
    assert done.status == 0 and "exists already: ACTIVE" in done.err, done.err
    assert "create" not in cloud.verbs and sorted(cloud.ran) == ["a0", "a1"]


@pytest.mark.slow
def test_steps_alone_in_the_wrong_order(cloud):
    there(cloud)
    for step, before in (("install", "copy"), ("start", "copy")):
        done = cloud.command(step, "--name=run")
        assert done.status == 1 and f"this comes after: launch/gcloud_tpu.py {before}" in done.err
    for worker in "01":
        folder = cloud.folder / f"hosts/run/{worker}/perex/run"
        folder.mkdir(parents=True)
        (folder / "bundle.tar.gz").write_text("new")
        (folder / "installed").write_text("of an older bundle")
    done = cloud.command("start", "--name=run")
    assert done.status == 1 and "this comes after: launch/gcloud_tpu.py install" in done.err
    assert not list(cloud.folder.rglob("starter.pid"))


@pytest.mark.slow
def test_a_worker_that_dies_hard_leaves_its_log(cloud):
    code = "import signal\nif ran('0') == 1: os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)"
    cloud.work(cloud.job("a", code))
    done = cloud.launch()
    assert done.status == 0, done.err
    logs = list((cloud.root / ".launch/run/logs").glob("*/0-000*/host.00000.log"))
    assert len(logs) == 2 and all("hello of a" in path.read_text() for path in logs)


SECRETS = {"HF_TOKEN": "hf-token:3", "OTHER": "projects/other-project/secrets/o/versions/latest"}


def test_secrets_reach_the_job_and_nothing_else(cloud):
    scenario(cloud, states=["ACTIVE"], secrets={"hf-token": "the-value-of-it", "o": "other-value"})
    code = (
        "assert os.environ['HF_TOKEN'][::-1] == 'ti-fo-eulav-eht', 1\nprint('has', os.environ['HF_TOKEN'], flush=True)"
    )
    cloud.work(cloud.job("a", code))
    done = cloud.launch(secrets=SECRETS, keep=True)
    assert done.status == 0, done.err
    assert "has [secret HF_TOKEN]" in done.out
    [asked] = {tuple(argv) for argv in cloud.host_commands if "access" in argv and "--secret=o" in argv}
    assert asked[4:] == ("latest", "--secret=o", "--project=other-project")
    for path in cloud.folder.rglob("*"):
        if path.is_file() and path.name != "scenario.json":
            assert b"the-value-of-it" not in path.read_bytes(), path


@pytest.mark.parametrize(
    "values,status,words",
    [
        ({}, 2, "--secret HF_TOKEN: version 3 of the secret 'hf-token' in my-project cannot be found"),
        ({"secret_state": "DISABLED"}, 2, "is DISABLED"),
        ({"secret_error": "PERMISSION_DENIED: Permission 'secretmanager.versions.access' denied"}, 2, "secretAccessor"),
    ],
)
def test_secrets_that_cannot_be_read(cloud, values, status, words):
    scenario(cloud, states=["ACTIVE"], **({"secrets": {"hf-token": "x"}} if values else {}), **values)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch(secrets={"HF_TOKEN": "hf-token:3"})
    assert done.status == status and words in done.err + done.out, done.err
    assert cloud.ran == [] and cloud.resources == {}


def test_another_bundle_than_the_launched_one_is_not_unpacked(tmp_path, cloud):
    folder = cloud.root / ".launch/run"
    folder.mkdir(parents=True)
    (folder / "bundle-0000000000000000.tar.gz").write_text("changed")
    there(cloud)
    script = remote.copy("run", "gs://my-bucket/x/.launch/run/bundle-0000000000000000.tar.gz", "0" * 64)
    done = subprocess.run(
        ["bash", "-c", script], env={**cloud.environment, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "it was changed after the launch" in done.stderr
    assert not (tmp_path / "perex/run/bundle.tar.gz").exists()


@pytest.mark.parametrize(
    "version,found",
    [("(3, 11, 0, 'candidate', 1)", False), ("(3, 10, 9, 'final', 0)", False), ("(3, 12, 1, 'final', 0)", True)],
)
def test_only_released_pythons_are_used(tmp_path, version, found):
    """With a python3.11 of that version, and neither a package index nor an archive of Ubuntu packages within reach."""
    (tmp_path / "perex/run").mkdir(parents=True)
    (tmp_path / "perex/run/bundle.tar.gz").write_text("")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3", "sudo", "python3.13", "python3.12"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
    fake = '#!/bin/sh\nif [ "$1" = -c ]; then exec PYTHON -c "import collections, sys; '
    fake += "n = 'major minor micro releaselevel serial'; sys.version_info = collections.namedtuple('V', n)(*VERSION); "
    fake += '$2"; fi\necho venv $3 >&2; exit 7\n'
    (tools / "python3.11").write_text(fake.replace("PYTHON", sys.executable).replace("VERSION", version))
    for path in tools.iterdir():
        path.chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path)}
    for python in (None, "python3.11"):
        done = subprocess.run(
            ["bash", "-c", remote.install("run", python)], env=environment, capture_output=True, text=True
        )
        expected = "venv venv" if found else "not a release" if python else "no released Python of 3.11 or newer"
        assert expected in done.stderr and done.returncode == (7 if found else 1), done.stderr


def test_a_checksum_from_the_bucket_is_no_script(tmp_path, monkeypatch, capsys):
    """It is written into what the hosts run; and it is said if this machine has not computed it."""
    monkeypatch.setenv("PEREX_T5X_LAUNCH_DIR", str(tmp_path))
    answers = Namespace(stdout="", returncode=0)
    commands = Commands()
    monkeypatch.setattr(commands, "run", lambda *_, **__: answers)
    todo = steps.Steps(resource.Resource("run", "p", "us-west4-a", 1), commands)
    for answers.stdout in ("", "0" * 63 + ";", "$(reboot)", "0" * 65):
        assert todo.uploaded("gs://bucket/x") is None
    digest = answers.stdout = "ab" * 32
    assert todo.uploaded("gs://bucket/x") == steps.Bundle("gs://bucket/x", digest)
    assert "another machine has built" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bundle.sha256").write_text(digest)
    assert todo.uploaded("gs://bucket/x") == steps.Bundle("gs://bucket/x", digest)
    assert capsys.readouterr().err == ""
    answers.returncode = 1
    assert todo.uploaded("gs://bucket/x") is None
