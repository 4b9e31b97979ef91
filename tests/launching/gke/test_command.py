"""launch/gke.py with a stand-in for kubectl: which commands, in which order, and what is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching.gke.schemas.rules import problems

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FLAGS = ["--topology=v5e:16x16", "--image=registry/perex:1", "--poll_seconds=0.05"]
READY = {"named": ["perex", "high"], "queues": ["multislice-queue"], "quota": {"google.com/tpu": 256}}


class Kubernetes:
    """A cluster that is not there."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "kubectl").symlink_to(HERE.parent / "standins" / "kubectl")
        self.scenario()

    def scenario(self, **values) -> None:
        (self.folder / "scenario.json").write_text(json.dumps({**READY, **values}))

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "STANDIN": str(self.folder)} | {
            "PEREX_T5X_RETRY_SECONDS": "0.01",
            # A gcloud or kubectl of this machine knows no project and no cluster here.
            "CLOUDSDK_CONFIG": str(self.folder / "gcloud-config"),
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "GCE_METADATA_HOST": "127.0.0.1:1",
            **more,
        }

    def start(self, *argv: str, stdin: int = subprocess.DEVNULL, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), *argv, *FLAGS],
            env=self.environment(**environment),
            cwd=self.folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(*argv, **environment)
        out, err = process.communicate(timeout=100)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def record(self) -> list[str]:
        """The commands, without what they all have."""
        path = self.folder / "record.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        common = ("--context=", "--namespace=default", "--output=json")
        return [" ".join(word for word in json.loads(line) if not word.startswith(common)) for line in lines]

    def created(self) -> list[dict]:
        path = self.folder / "created.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> list[str]:
        path = self.folder / "state.json"
        objects = json.loads(path.read_text())["objects"] if path.exists() else []
        made = [o["metadata"] | {"kind": o["kind"]} for o in objects]
        return [f"{o['kind']} {o['name']}".replace(o["labels"]["perex-launch"], "LAUNCH") for o in made]

    def wait_for(self, process: subprocess.Popen, text: str, times: int = 1) -> None:
        end = time.monotonic() + 60
        while sum(text in line for line in self.record()) < times:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, self.record()
            time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path) -> Kubernetes:
    return Kubernetes(tmp_path)


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_from_the_checks_to_the_end(cluster):
    cluster.scenario(timeline=["queued", "starting", "running", "running", "restart", "running", "completed"])
    done = cluster.run("--name=sqrt", "--queue=multislice-queue", "--service_account=perex", "--priority=high")
    assert done.returncode == 0, done.stderr
    record = [
        line for line in cluster.record() if not line.startswith("get jobsets.jobset.x-k8s.io --selector=perex-name")
    ]
    selector = "cloud.google.com/gke-tpu-accelerator=tpu-v5-lite-podslice,cloud.google.com/gke-tpu-topology=16x16"
    run = cluster.created()[0]["metadata"]["labels"]["perex-run"]
    assert record[:12] == [
        "config current-context",
        "get crd jobsets.jobset.x-k8s.io",
        "get localqueues.kueue.x-k8s.io",
        "get clusterqueues.kueue.x-k8s.io",
        "get serviceaccount perex --output=name",
        "get priorityclass high --output=name",
        f"get nodes --selector={selector}",
        f"get jobsets.jobset.x-k8s.io --selector=perex-run={run}",
        "get jobsets.jobset.x-k8s.io",
        "create --filename=-",
        f"get jobsets.jobset.x-k8s.io --selector=perex-run={run}",
        "create --filename=-",
    ]
    jobset, config_map = cluster.created()
    assert (jobset["kind"], config_map["kind"]) == ("JobSet", "ConfigMap")
    assert problems(jobset) == problems(config_map) == []
    assert len(config_map["metadata"]["ownerReferences"]) == 1  # deleted with its JobSet
    # Two pods, one before and one after the restart: the log of each.
    assert [line for line in cluster.record() if line.startswith("logs")] == [
        "logs --follow --container=perex pod/sqrt-slice-0-0-0abcd",
        "logs --follow --container=perex pod/sqrt-slice-0-0-1abcd",
    ]
    assert done.stdout.count("loss 2.5") == 2
    for words in ("queued", "starting", "running", "restarted 1 times", "is finished"):
        assert words in done.stderr
    assert "stop --name=sqrt" in last_line(done)
    assert all(
        "--context=gke_project_zone_cluster" in line
        for line in (cluster.folder / "record.jsonl").read_text().splitlines()[1:]
    )


def test_pods_run_the_digest_that_the_tag_had_at_the_launch(cluster):
    digest = "sha256:" + "a" * 64
    gcloud = cluster.folder / "bin" / "gcloud"
    gcloud.write_text(f"#!/bin/sh\ncase $3 in images) echo {digest};; esac\n")
    gcloud.chmod(0o755)
    process = subprocess.run(
        [sys.executable, str(HERE / "driver.py"), *FLAGS, "--image=eu-docker.pkg.dev/p/r/n:1", "--name=sqrt"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        cwd=cluster.folder,
    )
    assert process.returncode == 0, process.stderr
    pod = cluster.created()[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"eu-docker.pkg.dev/p/r/n@{digest}"
    assert f"  image: eu-docker.pkg.dev/p/r/n@{digest}" in cluster.run("status", "--name=sqrt").stdout.splitlines()


def test_secrets_are_references_and_checked_without_their_values(cluster):
    cluster.scenario(secrets={"hf": ["token"]})
    for given, words in (
        ("other/token", "no such Secret"),
        ("hf/key", "no key key; it has token"),
        ("hf", "SECRET/KEY"),
    ):
        done = cluster.run("--name=sqrt", f"--secret=HF_TOKEN={given}")
        assert done.returncode == 2 and f"--secret HF_TOKEN={given}" in done.stderr and words in done.stderr
    assert cluster.created() == []
    done = cluster.run("--name=sqrt", "--secret=HF_TOKEN=hf/token", "--env=A=$(b)", "--libtpu_args=--xla_a=1")
    assert done.returncode == 0, done.stderr
    jobset, config_map = cluster.created()
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [secret] = [env for env in pod["containers"][0]["env"] if env["name"] == "HF_TOKEN"]
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    work = json.loads(config_map["data"]["file-0"])
    assert work["environment"] == {"A": "$(b)", "LIBTPU_INIT_ARGS": "--xla_a=1"} and work["secrets"] == ["HF_TOKEN"]
    cluster.scenario(secrets_forbidden=True)
    done = cluster.run("--name=other", "--dir=gs://bucket/other", "--secret=HF_TOKEN=hf/token")
    assert done.returncode == 0 and "whether the Secret hf exists is not known" in done.stderr


def test_a_log_that_breaks_off_is_taken_up(cluster):
    cluster.scenario(timeline=["running"] * 8 + ["completed"], log_breaks=True)
    assert cluster.run("--name=sqrt").returncode == 0
    assert sum(line.startswith("logs") for line in cluster.record()) > 1


def test_a_cluster_that_does_not_answer_for_a_while(cluster):
    cluster.scenario(timeline=["running"])
    process = cluster.start("--name=sqrt")
    cluster.wait_for(process, "logs")
    cluster.scenario(timeline=["running"], unreachable=True)
    cluster.wait_for(process, "get", times=len(cluster.record()) + 8)
    cluster.scenario(timeline=["completed"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "i/o timeout" in err, err


def test_a_launch_that_someone_else_deletes(cluster):
    cluster.scenario(timeline=["running"])
    process = cluster.start("--name=sqrt")
    cluster.wait_for(process, "logs")
    assert cluster.run("stop", "--name=sqrt").returncode == 0
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "it was deleted" in err, err


def test_a_sweep_is_shared_out(cluster):
    done = cluster.run("--name=sqrt", "--jobsets=2", RUNS="5")
    assert done.returncode == 0, done.stderr
    jobsets = [o for o in cluster.created() if o["kind"] == "JobSet"]
    runs = [[job["name"] for job in json.loads(o["data"]["file-0"])["jobs"]] for o in cluster.created() if "data" in o]
    assert [o["metadata"]["name"] for o in jobsets] == ["sqrt-0", "sqrt-1"]
    assert runs == [["run0", "run2", "run4"], ["run1", "run3"]]
    assert cluster.run("--name=sqrt", "--jobsets=6", RUNS="5").returncode == 2


def test_dry_run_prints_what_a_launch_does_and_does_nothing(cluster):
    flags = ["--name=sqrt", "--context=here", "--queue=multislice-queue"]
    dry = cluster.run("--dry_run", *flags)
    assert dry.returncode == 0, dry.stderr
    assert cluster.record() == cluster.left() == []
    assert cluster.run(*flags).returncode == 0
    issued = [
        "kubectl " + " ".join(json.loads(line)) for line in (cluster.folder / "record.jsonl").read_text().splitlines()
    ]
    printed = [line.rpartition(" | ")[2] for line in dry.stdout.splitlines()]  # what `create` reads comes before it
    assert printed == issued[: len(printed)]
    assert sum("create" in line for line in printed) == 2
    (cluster.folder / "state.json").unlink()
    subprocess.run(["bash", "-euc", dry.stdout], env=cluster.environment(), check=True, capture_output=True)
    assert cluster.left() == ["JobSet sqrt", "ConfigMap sqrt-LAUNCH"]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"context": ""}, "no current context"),
        ({"crd": "none"}, "kubectl apply --server-side"),
        ({"crd": "old"}, "older than v0.7"),
        ({"crd": "v0.6"}, "older than v0.7"),
        ({"queues": ["other"]}, "no such LocalQueue in the namespace default; it has other"),
        (
            {"quota": {"google.com/tpu": "128"}},
            "a quota of 128 chips of one kind, 256 are requested: it would be queued",
        ),
        ({"quota": {"nvidia.com/gpu": 8}}, "no quota of google.com/tpu"),
        ({"named": []}, "--service_account=perex: there is no such serviceaccount"),
        (
            {"nodes": [{"metadata": {"labels": {}}, "status": {"allocatable": {"google.com/tpu": "8"}}}]},
            "set --chips_per_host=8",
        ),
    ],
)
def test_a_cluster_that_is_not_ready(cluster, scenario, words):
    cluster.scenario(**scenario)
    done = cluster.run("--name=sqrt", "--queue=multislice-queue", "--service_account=perex")
    assert done.returncode == 2
    assert words in done.stderr
    assert cluster.created() == []


def test_a_cluster_that_cannot_be_reached(cluster):
    cluster.scenario(unreachable=True)
    done = cluster.run("--name=sqrt", "--queue=multislice-queue", "--service_account=perex")
    assert done.returncode == 2
    error = done.stderr.rpartition("ERROR: ")[2]
    assert error.startswith("kubectl cannot reach the cluster gke_") and "i/o timeout" in error
    assert "memcache.go" not in error  # kubectl's own log
    assert cluster.record() == [
        "config current-context",
        *["get crd jobsets.jobset.x-k8s.io"] * 4,
    ]  # not asked for more


def test_what_may_come_by_itself_is_a_note(cluster):
    cluster.scenario(crd="forbidden", nodes=[])
    done = cluster.run("--name=sqrt")
    assert done.returncode == 0
    assert "note: the cluster has no node with" in done.stderr


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"quota": {"google.com/tpu": 8}, "cohort": {"cohort": "lab"}}, "it has to borrow from its cohort"),
        ({"quota_forbidden": True}, "could not be read"),
    ],
)
def test_a_quota_that_may_do_is_a_note(cluster, scenario, words):
    cluster.scenario(**scenario)
    done = cluster.run("--name=sqrt", "--queue=multislice-queue")
    assert done.returncode == 0 and words in done.stderr


def test_a_namespace_that_is_not_there(cluster):
    cluster.scenario(named=["team-a"])
    done = cluster.run("--name=sqrt", "--namespace=team-b")
    assert done.returncode == 2 and "--namespace=team-b: there is no such namespace." in done.stderr
    assert cluster.created() == []
    assert cluster.run("--name=sqrt", "--namespace=team-a").returncode == 0


def test_all_slips_of_the_cluster_at_once(cluster):
    cluster.scenario(crd="none", queues=[], named=[])
    done = cluster.run("--name=sqrt", "--queue=q", "--service_account=s", "--priority=p")
    assert all(words in done.stderr for words in ("JobSet is not installed", "--queue=q", "=s:", "=p:"))


@pytest.mark.parametrize(("code", "status"), [(2, 2), (3, 3), (10, 10), (7, 1), (8, 1), (137, 1)])
def test_a_failed_jobset_ends_with_the_status_of_its_program(cluster, code, status):
    cluster.scenario(timeline=["running", "failed"], exit_code=code)
    done = cluster.run("--name=sqrt")
    assert done.returncode == status
    assert "stop --name=sqrt" in last_line(done)


@pytest.mark.parametrize(
    "what", ["JobSet sqrt-0", "ConfigMap sqrt-0-LAUNCH", "JobSet sqrt-1", "ConfigMap sqrt-1-LAUNCH"]
)
def test_whatever_fails_half_way_nothing_is_left(cluster, what):
    cluster.scenario(refuse={what: "Error from server (InternalError): an error on the server"})
    done = cluster.run("--name=sqrt", "--jobsets=2", RUNS="2")
    assert done.returncode == 1
    assert "InternalError" in done.stderr
    assert cluster.left() == []


def test_what_cannot_be_deleted_is_named_in_the_last_line(cluster):
    cluster.scenario(refuse={"ConfigMap sqrt-LAUNCH": "Error from server: no"}, delete_fails=True)
    done = cluster.run("--name=sqrt")
    assert done.returncode == 1
    assert cluster.left() == ["JobSet sqrt"]
    command = re.search(r"delete it with: (kubectl .*)", last_line(done))[1]
    cluster.scenario()
    subprocess.run(["bash", "-c", command], env=cluster.environment(), check=True, capture_output=True)
    assert cluster.left() == []


def test_ctrl_c_while_creating_leaves_nothing(cluster):
    cluster.scenario(slow={"create": 3})  # it is created, but the answer does not come
    process = cluster.start("--name=sqrt")
    cluster.wait_for(process, "create")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert cluster.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_following_leaves_the_run_and_says_how_to_stop_it(cluster, number):
    cluster.scenario(timeline=["running"])
    process = cluster.start("--name=sqrt")
    cluster.wait_for(process, "logs")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert cluster.left() == ["JobSet sqrt", "ConfigMap sqrt-LAUNCH"]
    assert "continues" in err and "./launch/gke.py follow --name=sqrt" in err
    words = re.search(r"to stop and delete it: ./launch/gke.py (.*)", err.strip().splitlines()[-1])[1].split()
    assert cluster.run(*words).returncode == 0
    assert cluster.left() == []


def test_nohup_goes_on_following(cluster):
    cluster.scenario(timeline=["running"])
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it; the process inherits it
    try:
        process = cluster.start("--name=sqrt")
    finally:
        signal.signal(signal.SIGHUP, former)
    cluster.wait_for(process, "logs")
    process.send_signal(signal.SIGHUP)
    cluster.scenario(timeline=["completed"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "sqrt is finished" in err, err


def test_launching_again_finds_the_running_one(cluster):
    cluster.scenario(timeline=["running"])
    first = cluster.start("--name=sqrt")
    cluster.wait_for(first, "logs")
    again = cluster.run("--name=other")  # another name, the same folder
    assert again.returncode == 2
    assert "JobSet sqrt is running" in again.stderr and "follow --name=sqrt" in again.stderr
    cluster.scenario(timeline=["completed"])
    first.communicate(timeout=60)
    assert sum(o["kind"] == "JobSet" for o in cluster.created()) == 1


def test_launching_again_with_yes_follows(cluster):
    cluster.scenario(timeline=["running"])
    first = cluster.start("--name=sqrt")
    cluster.wait_for(first, "logs")
    second = cluster.start("--name=sqrt", "--yes")
    cluster.wait_for(second, "logs", times=2)
    cluster.scenario(timeline=["completed"])
    for process in (first, second):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert sum(o["kind"] == "JobSet" for o in cluster.created()) == 1


@pytest.mark.parametrize(("answer", "followed"), [("y", True), ("n", False)])
def test_launching_again_on_a_terminal_offers_to_follow(cluster, answer, followed):
    cluster.scenario(timeline=["running"])
    first = cluster.start("--name=sqrt")
    cluster.wait_for(first, "logs")
    ours, theirs = pty.openpty()
    second = cluster.start("--name=sqrt", stdin=theirs)
    os.write(ours, f"{answer}\n".encode())
    if followed:
        cluster.wait_for(second, "logs", times=2)
        cluster.scenario(timeline=["completed"])
    _, err = second.communicate(timeout=60)
    cluster.scenario(timeline=["completed"])
    first.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert second.returncode == 0 and "Follow it? [y/N]" in err
    assert ("is finished" in err) == followed
    assert sum(o["kind"] == "JobSet" for o in cluster.created()) == 1


def test_two_launches_at_once_make_one(cluster):
    cluster.scenario(timeline=["running"] * 3 + ["completed"])
    both = [cluster.start("--name=sqrt") for _ in range(2)]
    ends = []
    for process in both:
        _, err = process.communicate(timeout=60)
        ends.append((process.returncode, err))
    assert cluster.left() == ["JobSet sqrt", "ConfigMap sqrt-LAUNCH"]
    # The later one is refused, or, if the first had finished by then, takes its place.
    assert sorted(code for code, _ in ends) in ([0, 0], [0, 2]), ends


@pytest.mark.slow
@pytest.mark.parametrize("mine", [["--name=sqrt"], ["--name=sqrt", "--jobsets=2"], ["--name=other"]])
def test_a_race_that_is_lost_deletes_nothing_of_the_winner(cluster, mine):
    cluster.scenario(timeline=["running"], late=True)
    first = cluster.start("--name=sqrt-1" if len(mine) > 1 else "--name=sqrt")
    cluster.wait_for(first, "logs")
    winner = cluster.left()
    late = cluster.run(*mine, RUNS="2")
    assert late.returncode == 2 and "was faster" in late.stderr
    assert cluster.left() == winner
    cluster.scenario(timeline=["completed"])
    first.communicate(timeout=60)


def test_a_name_of_another_run_is_refused(cluster):
    assert cluster.run("--name=sqrt").returncode == 0
    done = cluster.run("--name=sqrt", "--dir=gs://bucket/other")
    assert done.returncode == 2 and "belongs to another run" in done.stderr
    assert len(cluster.created()) == 2


def test_a_finished_one_of_the_same_run_makes_room(cluster):
    cluster.scenario(timeline=["failed"], exit_code=2)
    assert cluster.run("--name=sqrt").returncode == 2
    cluster.scenario(late_garbage=True)  # what a JobSet owns goes some time after it
    state = json.loads((cluster.folder / "state.json").read_text())
    state["objects"][0]["timeline"] = ["failed"]
    (cluster.folder / "state.json").write_text(json.dumps(state))
    done = cluster.run("--name=sqrt")
    assert done.returncode == 0, done.stderr
    assert "deleting the finished JobSet sqrt" in done.stderr
    assert cluster.left() == ["JobSet sqrt", "ConfigMap sqrt-LAUNCH"]


@pytest.mark.slow
def test_files_that_a_former_launch_left_are_not_those_of_the_next(cluster):
    assert cluster.run("--name=sqrt").returncode == 0
    cluster.scenario(late_garbage=True)
    state = json.loads((cluster.folder / "state.json").read_text())
    state["objects"] = [
        o for o in state["objects"] if o["kind"] == "ConfigMap"
    ]  # as of a manifest, after its time to live
    (cluster.folder / "state.json").write_text(json.dumps(state))
    done = cluster.run("--name=sqrt", RUNS="2")
    assert done.returncode == 0, done.stderr
    jobset, config_map = cluster.created()[-2:]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
    (cluster.folder / "bin" / "gcloud").write_text("#!/bin/sh\n")
    (cluster.folder / "bin" / "gcloud").chmod(0o755)
    assert cluster.run("collect", "--name=sqrt", "--out=here").returncode == 0
    jobs = json.loads((cluster.folder / "here/.launch/sqrt/jobs.json").read_text())["jobs"]
    assert [job["name"] for job in jobs] == ["run0", "run1"]


@pytest.mark.parametrize(
    ("trouble", "advice"),
    [
        (["Unschedulable", "0/3 nodes are available: 3 node(s) didn't match"], "no free slice"),
        (["ImagePullBackOff", 'Back-off pulling image "registry/perex:1"'], "check --image"),
    ],
)
def test_a_pod_that_does_not_come_up(cluster, trouble, advice):
    warning = {"type": "Warning", "reason": "FailedScheduling", "message": "no nodes", "lastTimestamp": "2026"}
    event = {**warning, "involvedObject": {"name": "sqrt-slice-0-0-0abcd"}}
    cluster.scenario(timeline=["starting"], trouble=trouble, events=[event])
    process = cluster.start("--name=sqrt")
    cluster.wait_for(process, "get pods")
    status = cluster.run("status", "--name=sqrt")
    assert status.returncode == 0
    assert f"2 pods wait (sqrt-slice-0-0-0abcd): {trouble[0]}: {trouble[1]}" in status.stdout
    assert advice in status.stdout
    assert "event: sqrt-slice-0-0-0abcd: FailedScheduling: no nodes" in status.stdout
    cluster.scenario(timeline=["completed"])
    _, err = process.communicate(timeout=60)
    assert trouble[1] in err and process.returncode == 0


@pytest.mark.parametrize("argv", [["--name=$(touch x)"], ["stop", "--name=a'; touch x #"], ["--name=a", "--queue=`x`"]])
def test_hostile_names_are_refused(cluster, argv):
    done = cluster.run(*argv)
    assert done.returncode == 2
    assert not (cluster.folder / "x").exists() and cluster.record() == []


def test_hostile_bindings_and_files_arrive_literally(cluster):
    binding = "A = '$(touch x) `touch y` \"; touch z'"
    gin = cluster.folder / "mine.gin"
    gin.write_text("B = '$(HOME)'\n")
    done = cluster.run("--name=sqrt", f"--gin_bindings={binding}", GIN_FILES=json.dumps({"a b/mine.gin": str(gin)}))
    assert done.returncode == 0, done.stderr
    jobset, config_map = cluster.created()
    assert json.loads(config_map["data"]["file-0"])["jobs"][0]["arguments"][-1] == binding
    assert config_map["data"]["file-1"] == gin.read_text()
    assert "$(" not in json.dumps(jobset)  # Kubernetes would replace it


def test_collect_asks_the_cluster_what_ran(cluster):
    assert cluster.run("--name=sqrt", "--jobsets=2", RUNS="3").returncode == 0
    gcloud = cluster.folder / "gcloud"
    gcloud.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {cluster.folder}/gcloud.txt\n')
    gcloud.chmod(0o755)
    path = f"{cluster.folder}:{cluster.environment()['PATH']}"
    done = cluster.run("collect", "--name=sqrt", "--out=here", PATH=path)
    assert done.returncode == 0, done.stderr
    assert (cluster.folder / "gcloud.txt").read_text().splitlines()[-2:] == ["gs://bucket/sweeps/sqrt", "here"]
    jobs = json.loads((cluster.folder / "here/.launch/sqrt/jobs.json").read_text())["jobs"]
    assert sorted(job["name"] for job in jobs) == ["run0", "run1", "run2"]
    assert cluster.run("collect", "--name=other", "--out=here", PATH=path).returncode == 2


@pytest.mark.slow
def test_list_and_stop_all(cluster):
    assert "no launches" in cluster.run("list").stdout
    for name in ("one", "two"):
        assert cluster.run(f"--name={name}", f"--dir=gs://bucket/{name}").returncode == 0
    listed = cluster.run("list").stdout
    assert "one: completed" in listed and "two: completed" in listed
    refused = cluster.run("stop", "--all")
    assert refused.returncode == 2 and "--yes" in refused.stderr and len(cluster.left()) == 4
    assert cluster.run("stop", "--all", "--yes").returncode == 0
    assert cluster.left() == []


def test_manifest_is_what_launch_creates(cluster):
    import yaml

    assert cluster.run("--name=sqrt").returncode == 0
    done = cluster.run("manifest", "--name=sqrt", "--out=m.yaml")
    assert done.returncode == 0 and "kubectl create --filename=m.yaml" in done.stderr
    _, jobset = yaml.safe_load_all((cluster.folder / "m.yaml").read_text())
    launched = cluster.created()[0]
    for found in (jobset, launched):
        text = json.dumps(found).replace(found["metadata"]["labels"]["perex-launch"], "LAUNCH")
        found.clear()
        found.update(json.loads(text))
    assert jobset == launched
    assert cluster.run("manifest", "--name=sqrt", "--out=no/such/folder").returncode == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lauch", "--name=a"], "Did you mean 'launch'"),
        (["follow"], "--name"),
        (["stop"], "--all"),
        (["launch", "--name=a", "--image="], "--image is missing"),
        (["launch", "--name=a", "--dir=/tmp/here"], "gs://"),
        (["launch", "--name=a", "--namespace=A B"], "--namespace"),
        (["launch", "--name=a", "--chips_per_host=3"], "--chips_per_host=3"),
        (["launch", "--name=a", "--poll_seconds=-1"], "--poll_seconds=-1.0"),
        (["follow", "--name=a", "--poll_seconds=nan"], "--poll_seconds=nan"),
        (["launch", "--name=a", "--ttl_hours=inf"], "--ttl_hours=inf"),
        (["status", "--name=nothing-there"], "no launch nothing-there"),
        (["stop", "--name=a", "--dir=gs://bucket/a", "--dry_run"], "--dry_run"),
        (["stop", "--name=a", "--dir=/tmp/a"], "gs://BUCKET/FOLDER"),
    ],
)
def test_slips(cluster, argv, words):
    process = subprocess.run(
        [sys.executable, str(HERE / "driver.py"), *FLAGS, *argv],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        cwd=cluster.folder,
    )
    assert process.returncode == 2, process.stderr
    assert words in process.stderr and "Traceback" not in process.stderr
    assert cluster.created() == []


def test_the_confirmation_shows_what_runs_side_by_side(monkeypatch, tmp_path, capsys):
    from perex_t5x.hardware.slices import Slice
    from perex_t5x.launching import checks, spec
    from perex_t5x.launching.gke import command
    from perex_t5x.launching.gke.cluster import Cluster
    from perex_t5x.launching.gke.create import Planned
    from perex_t5x.launching.gke.manifest import Shape
    from perex_t5x.launching.request import Request
    from perex_t5x.launching.shell import Commands

    asked = []
    monkeypatch.setattr(checks, "check_gin", lambda *_: asked.append("gin"))
    monkeypatch.setattr(checks, "bucket", lambda request, _, **options: asked.append(request.project))
    monkeypatch.setattr(checks, "preflight", lambda *_: checks.Estimate(256, 1.0, 8.0))
    (tmp_path / "gcloud").write_text("#!/bin/sh\necho my-project-1\n")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    work = spec.Work("a", "gs://b/a", (spec.Job("r", ("-m", "perex_t5x.train"), "gs://b/a/runs/r"),), sweep={})
    fields = {name: None for name in Request.__dataclass_fields__} | {"with_package": ()}
    request = Request(**fields | {"name": "a", "work": work, "slice": Slice.of("v5e-256"), "slices": 1, "yes": True})
    shapes = [
        Shape(f"a-{n}", "a", "1", "2", "i:1", "tpu-v5-lite-podslice", "16x16", hosts=64, chips_per_host=4)
        for n in (0, 1)
    ]
    command._check(request, Cluster(Commands(), context="here"), [Planned(shape, {}) for shape in shapes])
    said = capsys.readouterr().err
    assert asked == ["my-project-1", "gin"]
    assert "2 JobSets side by side, each of 1 x 64 pods with 4 chips" in said
    assert "4.0 hours, 2,048 chip-hours" in said  # the same chip-hours in half the time
    assert "its digest is not known" in said and "the code of this checkout" in said


@pytest.mark.slow
def test_the_real_script_with_real_gin_files(cluster):
    (cluster.folder / "short.gin").write_text("include 'runs/pretrain.gin'\nTRAIN_STEPS = 4\n")
    argv = [
        *("--gin_file=models/nano.gin", "--gin_file=short.gin", "--gin_file=optimizers/adamw.gin"),
        *("--gin.MIXTURE_OR_TASK_NAME='python_stdlib_lm'", "--gin.TASK_FEATURE_LENGTHS={'targets': 64}"),
        *("--gin.BATCH_SIZE=16", "--gin.MODEL_DIR='gs://bucket/runs/first'", "--topology=v5e:4x4", "--yes"),
        *("--image=registry/perex:1", "--poll_seconds=0.1", "--skip_preflight", "--gin.TRAIN_STEPS=5"),
    ]
    script = [sys.executable, str(ROOT / "launch" / "gke.py")]
    environment = cluster.environment(JAX_PLATFORMS="cpu")
    done = subprocess.run([*script, *argv], env=environment, cwd=cluster.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "first is finished" in done.stderr and "checking the Gin files on the devices of 1 x v5e:4x4" in done.stderr
    jobset, config_map = cluster.created()
    assert problems(jobset) == problems(config_map) == []
    assert config_map["data"]["file-1"] == (cluster.folder / "short.gin").read_text()
    arguments = json.loads(config_map["data"]["file-0"])["jobs"][0]["arguments"]
    assert "--initialization_timeout=3600" in arguments  # pods come up minutes apart
    refused = subprocess.run(
        [*script, *argv, "--gin.TRAIN_STEP=5"], env=environment, cwd=cluster.folder, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "TRAIN_STEPS" in refused.stderr and "Traceback" not in refused.stderr
