"""launch --detach against stand-ins: hosts boot, and do everything themselves; see standins/machine."""

import json
import subprocess
from types import SimpleNamespace as Namespace

import pytest

from perex_t5x import metrics
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching.gcloud import startup
from perex_t5x.launching.gcloud.resource import Resource
from perex_t5x.launching.gcloud.steps import Bundle
from tests.launching import c4_files, test_headline
from tests.launching.gcloud.support import Cloud, killed_workers, processes, scenario

DIR = "--dir=gs://my-bucket/x"
SAVES = "import signal\nsignal.signal(15, lambda n, f: (print('saved', flush=True), sys.exit(130)))\n"


@pytest.fixture
def cloud(tmp_path):
    yield Cloud(tmp_path)
    killed_workers(tmp_path)


def ended(cloud, seconds=120):
    """Waits until the launch has ended, and everything with it."""
    cloud.wait_for(lambda: cloud.detached["state"] == "ended" and not cloud.resources, seconds)
    cloud.wait_for(lambda: not processes(cloud.folder), 20)
    return cloud.detached


def test_from_nothing_to_the_end_without_a_launcher(cloud):
    scenario(cloud, secrets={"hf-token": "the-value"}, roles=["roles/viewer"])
    code = "print('token', len(os.environ['HF_TOKEN']), 'home', os.environ['HOME'], flush=True)\n"
    code += "from perex_t5x import goodput\nif host == '0':\n  os.makedirs(here + '/goodput')\n"
    code += "  one = goodput.Attempt(0, {'steps': 9000, 'compile': 1000}, 0, 40)\n"
    code += "  open(here + '/goodput/1.json', 'w').write(one.to_json())"
    cloud.work(cloud.job("a", code))
    done = cloud.detach(secrets={"HF_TOKEN": "hf-token"})
    assert done.status == 0, done.err
    assert f"launch/gcloud_tpu.py follow {DIR} --name=run" in done.err
    assert "note: 123456-compute@developer.gserviceaccount.com, as which the hosts run, has no role" in done.err
    state = ended(cloud)
    assert (state["exit_code"], state["restarts"], state["resource"]) == (0, 0, "run")
    assert sorted(cloud.ran) == ["a0", "a1"]
    assert [argv[4] for argv in cloud.host_commands if "delete" in argv] == ["delete"]
    # From another machine, which has nothing but the bucket.
    followed = cloud.elsewhere("follow", DIR)
    assert followed.status == 0 and "hello of a on 0" in followed.out and "token 9 home" in followed.out, followed.err
    status = cloud.elsewhere("status", DIR)
    assert status.status == 0 and "run: ended with exit code 0 (done)" in status.out
    assert "job 1 of 1, a: ended" in status.out and "a: goodput 90.0 % of 10 s in 1 attempt" in status.out, status.out
    assert cloud.elsewhere("collect", DIR, f"--out={cloud.folder}/out").status == 0
    assert "hello of a on 0" in (cloud.folder / "out/runs/a/log.txt").read_text()
    hosts = {path.parent.name for path in (cloud.root / ".launch/run/logs").glob("*/*/startup.*.log")}
    assert hosts == {"0-0000", "0-0001"}
    assert not [p for p in (cloud.folder / "bucket").rglob("*") if p.is_file() and b"the-value" in p.read_bytes()]


@pytest.mark.slow
def test_preempted_slices_are_replaced_by_themselves(cloud):
    code = SAVES + "if ran(host) == 1:\n  if host == '0': open(cloud + '/notice-run', 'w').write('60')\n"
    code += "  while True: time.sleep(0.1)\nprint('resumed', flush=True)"
    cloud.work(cloud.job("a", code))
    assert cloud.detach(spot=True).status == 0
    state = ended(cloud)
    assert (state["exit_code"], state["restarts"], state["resource"], state["attempt"]) == (0, 1, "run-r1", 1)
    assert sorted(cloud.ran) == ["a0", "a0", "a1", "a1"]
    created = [argv for argv in cloud.host_commands if "create" in argv]
    assert all({"run-r1", "--node-id=run-r1", "--spot"} <= set(argv) for argv in created)
    [first] = [argv for argv in cloud.commands if "create" in argv]
    labels = next(word for word in first if word.startswith("--labels="))
    assert labels.replace("attempt=0", "attempt=1") in created[0] and "perex-name=run," in labels
    followed = cloud.elsewhere("follow", DIR)
    assert followed.status == 0 and "resumed" in followed.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "exits,options,code,words", [(1, {}, 9, "no progress"), (7, {"max_restarts": 0}, 7, "interrupted 1 times")]
)
def test_given_up(cloud, exits, options, code, words):
    cloud.work(cloud.job("a", f"sys.exit({exits})"))
    assert cloud.detach(**options).status == 0
    state = ended(cloud)
    assert state["exit_code"] == code and words in state["message"]
    assert cloud.elsewhere("follow", DIR).status == code


@pytest.mark.slow
def test_deletion_is_refused(cloud):
    scenario(cloud, host_delete_error="PERMISSION_DENIED: Permission 'tpu.queuedResources.delete' denied")
    cloud.work(cloud.job("a", ""))
    assert cloud.detach().status == 0
    cloud.wait_for(lambda: "NOT DELETED" in cloud.detached["message"])
    assert list(cloud.resources) == ["run"] and cloud.detached["exit_code"] == 0
    assert "run was NOT DELETED and costs money" in cloud.elsewhere("status", DIR).out
    assert cloud.elsewhere("delete", DIR).status == 0 and cloud.resources == {}


@pytest.mark.slow
def test_stopped_from_another_machine_and_resumed(cloud):
    cloud.work(cloud.job("a", SAVES + "while not os.path.exists(cloud + '/go'): time.sleep(0.1)"))
    assert cloud.detach().status == 0
    cloud.wait_for(lambda: len(cloud.ran) == 2)
    again = cloud.detach()
    assert again.status == 0 and "needs nobody to watch it" in again.err, again.err
    assert cloud.elsewhere("stop", DIR, "--name=run").status == 0
    state = ended(cloud)
    assert state["exit_code"] == 10 and "requested" in state["message"]
    (cloud.folder / "go").touch()
    assert cloud.detach().status == 0
    assert ended(cloud)["exit_code"] == 0
    assert sorted(cloud.ran) == ["a0", "a0", "a1", "a1"]


@pytest.mark.slow
def test_taken_away_without_a_notice(cloud):
    cloud.work(cloud.job("a", "while not os.path.exists(cloud + '/go'): time.sleep(0.1)"))
    assert cloud.detach(spot=True).status == 0
    cloud.wait_for(lambda: len(cloud.ran) == 2)
    subprocess.run(["gcloud", "standin", "suspend", "run"], env=cloud.environment, check=True)
    status = cloud.elsewhere("status", DIR)
    assert "run: SUSPENDED" in status.out and "launch again with the same flags" in status.out
    followed = cloud.elsewhere("follow", DIR)
    assert followed.status == 1 and "launch again with the same flags" in followed.err
    (cloud.folder / "go").touch()
    again = cloud.detach(spot=True)
    assert again.status == 0 and "it is deleted and created again" in again.err
    assert ended(cloud)["exit_code"] == 0


@pytest.mark.slow
def test_a_host_that_boots_again(cloud):
    code = "if ran('1') == 1:\n  open(cloud + '/reboot-run-1', 'w') if host == '1' else time.sleep(2)\n  sys.exit(7)\n"
    cloud.work(cloud.job("a", code))
    assert cloud.detach().status == 0
    state = ended(cloud)
    assert state["exit_code"] == 0 and state["restarts"] == 1


@pytest.mark.slow
def test_the_docs_example_unattended(tmp_path, cloud_storage):
    """As tests/launching/test_headline.py, with --detach: two real processes train, are preempted with a notice, resume."""
    cloud = Cloud(tmp_path)
    cloud.environment |= {**cloud_storage.environment, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for path in c4_files.write(tmp_path / "tfds"):
        cloud_storage.put(f"tfds/{path}", (tmp_path / "tfds" / path).read_bytes())
    host = {"JAX_COORDINATOR_ADDRESS": f"localhost:{test_headline.free_port()}", "JAX_NUM_PROCESSES": "2"}
    host |= {"JAX_PROCESS_ID": "{worker}", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    host |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={test_headline.DEVICES // 2}"}
    # A host asks its own metadata server.
    host |= {name: value for name, value in cloud_storage.environment.items() if not name.startswith("GCE_METADATA")}
    scenario(cloud, host_environment=host)
    bucket = cloud_storage.bucket[len("gs://") :]
    flags = [*test_headline.command_in_docs(bucket), "--detach", "--yes", "--allow_uncommitted"]
    root = next(flag for flag in flags if flag.startswith("--dir="))
    try:
        done = cloud.command(*flags)
        assert done.status == 0, done.err
        folder = "sweeps/sqrt/.launch/sqrt-lr/"

        def state():
            return json.loads(cloud_storage.get(f"{folder}detached.json"))

        def saved():
            assert state()["state"] != "ended", state()
            return test_headline.whole_checkpoints(cloud_storage)

        cloud.wait_for(saved, 400)
        (cloud.folder / "notice-sqrt-lr").write_text("60")
        cloud.wait_for(lambda: state()["state"] == "ended" and not cloud.resources, 600)
        assert (state()["exit_code"], state()["resource"], state()["restarts"]) == (0, "sqrt-lr-r1", 1)
        cloud.wait_for(lambda: not processes(cloud.folder), 30)
        status = cloud.elsewhere("status", root)
        assert "goodput" in status.out, status.out + status.err
        assert cloud.elsewhere("collect", root, "--out=collected").status == 0
        for job in json.loads(cloud_storage.get(f"{folder}jobs.json"))["jobs"]:
            ran = tmp_path / "collected/runs" / job["name"]
            assert json.loads((ran / "finished.json").read_text())["status"] == "done"
            steps = [row["step"] for row in metrics.read_rows(str(ran)) if row["name"] == "train" and "loss" in row]
            assert len(steps) == len(set(steps)) and max(steps) == job["train_steps"]
    finally:
        killed_workers(tmp_path)


def test_refused_or_only_printed(cloud):
    """Nothing is left behind; the other one's slices are, where another launch was faster."""
    cloud.work(cloud.job("a", ""))
    printed = cloud.launch(detach=True, dry_run=True)
    assert printed.status == 0 and cloud.commands == [], printed.err
    create = next(line for line in printed.out.splitlines() if "queued-resources create" in line)
    assert f"startup-script={cloud.folder}/prepared/run/startup.sh" in create and "perex-attempt=0" in create
    assert "printf %s '#!/bin/bash" in printed.out
    scenario(cloud, states=["FAILED"], failed="RESOURCE_EXHAUSTED: Quota limit exceeded")
    refused = cloud.detach()
    assert refused.status == 1 and "is FAILED" in refused.err and cloud.resources == {}
    assert cloud.detached["state"] == "ended" and "Quota limit" in cloud.detached["message"]
    scenario(cloud, race=True, states=["ACCEPTED"])
    (cloud.folder / "state.json").unlink()
    late = cloud.detach()
    assert late.status == 1 and "exists already" in late.err and late.last.startswith("still there: "), late.err
    assert list(cloud.resources) == ["run"]


def request(**more):
    work = Namespace(fingerprint="0", root="gs://my-bucket/x", launch_id="id")
    values = {"name": "run", "slice": Slice.of("v5e-16"), "spot": True, "reservation": None, "max_restarts": 3}
    values |= {"keep": False, "secrets": {"HF_TOKEN": "hf-token"}, "work": work, **more}
    return Namespace(**values)


def test_the_script_is_bash_of_any_launch():
    target = Resource("run", "my-project", "us-west4-a", 2)
    text = startup.script(
        request(), target, Bundle("gs://my-bucket/x/.launch/run", "a" * 64), "0123", None, ["--tags=it's"]
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert len(text) < 30_000 and "a" * 64 in text
    # What the hosts would type for the successor.
    shown = text[: text.index("\nset -u")] + '\ngcloud() { for w in "$@"; do echo "[$w]"; done; }\ncreate run-r3 3\n'
    words = subprocess.run(["bash", "-c", shown], text=True, capture_output=True, check=True).stdout.splitlines()
    assert {"[run-r3]", "[--node-prefix=run-r3]", "[--node-count=2]", "[--spot]", "[--tags=it's]", "[--async]"} <= set(
        words
    )
    assert "[--metadata=^;^perex-attempt=3;perex-root=gs://my-bucket/x]" in words
    assert "[--labels=perex-name=run,perex-run=0,perex-commit=0123,perex-attempt=3]" in words
    with pytest.raises(ConfigError, match="the cloud accepts 262,144"):
        startup.script(request(), target, Bundle("gs://x/y", "a" * 64), "0", None, ["--description=" + "x" * 300_000])


def test_the_stand_in_parses_metadata_as_gcloud_does(cloud):
    argv = ["gcloud", "compute", "tpus", "queued-resources", "create", "a", "--node-id=a", "--zone=us-west4-a"]
    argv += [
        "--runtime-version=x",
        "--labels=a=b",
        "--metadata=^;^a=gs://b/c,d=e;f=g",
        "--accelerator-type=v5litepod-16",
    ]
    assert subprocess.run(argv, env=cloud.environment, capture_output=True).returncode == 0
    assert cloud.resources["a"]["metadata"] == {"a": "gs://b/c,d=e", "f": "g"}
    missing = subprocess.run([*argv, "--metadata-from-file=x=/nothing"], env=cloud.environment, capture_output=True)
    assert missing.returncode == 1
    assert json.loads((cloud.folder / "state.json").read_text())
