"""launch/gcloud_tpu.py against a stand-in for gcloud: the commands, their order, retries, and that nothing stays behind."""

import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys

import pytest

from perex_t5x.errors import Reason
from tests.launching.gcloud.support import ROOT, Cloud, finished, killed_workers, scenario, there

PREEMPTS_ONCE = """
if not os.path.exists(here + '/checkpoint_5/' + host):
    os.makedirs(here + '/checkpoint_5/' + host)
    if host == '0':
        open(cloud + '/preempt', 'w')
    time.sleep(60)
print('resumed at 5', flush=True)
"""


@pytest.fixture
def cloud(tmp_path):
    yield Cloud(tmp_path)
    killed_workers(tmp_path)


def test_from_nothing_to_collected_and_deleted(cloud):
    hostile = ["$(touch hostile)", 'it\'s "quoted"; rm -rf x', "`touch hostile`", "a\nb", "*"]
    cloud.work(cloud.job("a", "print('given', sys.argv[1:])", *hostile), cloud.job("b", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert [v for v in cloud.verbs if v != "describe"] == ["list", "cp", "create", "list", "ssh", "rsync", "delete"]
    scripts = [next(w for w in argv if w.startswith("--command=")) for argv in cloud.commands if "ssh" in argv]
    assert ["gcloud storage cp" in s or "pip install" in s or "setsid" in s for s in scripts] == [True] * 3 + [False]
    assert sorted(cloud.ran) == ["a0", "a1", "b0", "b1"]
    assert cloud.resources == {}
    assert "hello of a on 0" in done.out and "hello of a on 1" not in done.out
    assert "given " + repr(hostile) in done.out
    assert not list(cloud.folder.rglob("hostile"))
    assert "hello of b on 0" in (cloud.folder / "out/runs/b/log.txt").read_text()
    assert json.loads((cloud.folder / "out/runs/b/finished.json").read_text())["status"] == "done"


def test_a_dry_run_prints_exactly_what_would_be_done(cloud):
    scenario(cloud, states=["ACTIVE"])
    cloud.environment["PEREX_T5X_POLL_SECONDS"] = "60"
    cloud.work(cloud.job("a", ""))
    printed = cloud.launch(dry_run=True)
    assert printed.status == 0, printed.err
    assert cloud.commands == [] and not (cloud.folder / "prepared").exists()
    assert cloud.launch().status == 0
    digest = (cloud.root / ".launch/run/bundle.sha256").read_text()  # a dry run builds nothing
    assert hashlib.sha256((cloud.folder / "prepared/run/bundle.tar.gz").read_bytes()).hexdigest() == digest
    given = [shlex.join(argv).replace(digest, "SHA256").replace(digest[:16], "SHA256") for argv in cloud.commands]
    given = [re.sub(r"(PEREX_T5X_ATTEMPT=)\d{8}T\d{6}Z", r"\1ATTEMPT", line) for line in given]
    assert [line for line in printed.out.splitlines() if line.startswith("gcloud")] == given
    assert all(line.split()[0] in ("gcloud", "tar", "rm", "mkdir", "cp", "printf") for line in printed.out.splitlines())


@pytest.mark.slow
def test_several_slices_are_set_up_at_the_same_time(cloud):
    scenario(cloud, ssh_together=2)  # a connection to one slice ends only if the other's is there
    cloud.work(cloud.job("a", "while len(open(cloud + '/ran').read().split()) < 4: time.sleep(0.1)"))  # as real ones do
    assert cloud.launch(slices=2, spot=True).status == 0
    create = next(argv for argv in cloud.commands if "create" in argv)
    assert {"--node-count=2", "--node-prefix=run", "--spot"} <= set(create) and "--node-id=run" not in create
    nodes = [argv[5] for argv in cloud.commands if "ssh" in argv]
    assert [set(nodes[i : i + 2]) for i in (0, 2, 4)] == [{"run-0", "run-1"}] * 3 and nodes[6:] == ["run-0"]
    assert sorted(cloud.ran) == ["a0", "a1", "a100", "a101"]


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_first_slice_that_fails_ends_the_others(cloud, interrupted):
    failing = {} if interrupted else {"ssh_fails": {"worker": 1, "node": "run-1"}}
    scenario(cloud, states=["ACTIVE"], ssh_hangs="run-0", **failing)
    cloud.work(cloud.job("a", ""))
    process = cloud.start(slices=2)
    if interrupted:
        cloud.wait_for(lambda: sum("ssh" in argv for argv in cloud.commands) == 2)
    done = finished(process, signal.SIGINT if interrupted else None)
    assert done.status == (130 if interrupted else 1), done.err
    assert interrupted or "copying failed on worker 1 of run-1, 4 times" in done.err
    assert cloud.resources == {} and cloud.ran == []


def test_preempted_half_way_goes_on_on_new_slices(cloud):
    cloud.work(cloud.job("first", ""), cloud.job("a", PREEMPTS_ONCE))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert [v for v in cloud.verbs if v in ("create", "delete", "rsync")] == [
        "create",
        "delete",
        "create",
        "rsync",
        "delete",
    ]
    assert "the slices were preempted" in done.err and "resumed at 5" in done.out
    assert cloud.ran.count("first0") == 1, "a finished job runs once"
    assert cloud.resources == {}


@pytest.mark.slow
def test_preempted_before_the_program_runs(cloud):
    scenario(cloud, states=["ACTIVE"], preempt_at_ssh=2)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert "preempted before the program ran" in done.err and cloud.verbs.count("create") == 2
    assert sorted(cloud.ran) == ["a0", "a1"] and cloud.resources == {}


@pytest.mark.slow
def test_preempted_too_often(cloud):
    cloud.work(cloud.job("a", "open(cloud + '/preempt', 'w')\ntime.sleep(60)"))
    done = cloud.launch(max_restarts=1)
    assert done.status == 1
    assert "interrupted 2 times, --max_restarts=1" in done.err
    assert cloud.verbs.count("create") == 2
    assert cloud.resources == {}


QUOTA = (
    "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 16 in zone x."
)
STOCKOUT = 'There is no more capacity in the zone "us-west4-a"; you can try in another zone.'


@pytest.mark.parametrize(
    "values,words",
    [
        ({"create_error": QUOTA}, "quota is too small"),
        ({"create_error": "PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"}, "roles/tpu.admin"),
        ({"create_error": "Cloud TPU API has not been used in project 1 before or it is disabled."}, "services enable"),
        ({"states": ["ACCEPTED", "FAILED"], "failed": QUOTA}, "quota is too small"),
        (
            {"states": ["ACCEPTED", "FAILED"], "failed": 'There is no more capacity in the zone "us-west4-a"'},
            "no such slices",
        ),
    ],
)
def test_refused_by_the_cloud(cloud, values, words):
    scenario(cloud, **values)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 1
    assert words in done.err and (values.get("create_error") or values["failed"]).split(":")[0] in done.err
    assert cloud.verbs[-1] == "delete" and cloud.resources == {}


def test_the_slices_never_come(cloud):
    scenario(cloud, states=["WAITING_FOR_RESOURCES"])
    cloud.work(cloud.job("a", ""))
    done = cloud.launch(wait_hours=0.0001)
    assert done.status == 1 and "WAITING_FOR_RESOURCES after 0.0001 hours" in done.err
    assert cloud.resources == {}


@pytest.mark.parametrize(
    "values,words",
    [
        ({"no_bucket": True}, "buckets create gs://my-bucket"),
        ({"bucket_error": "You do not currently have an active account selected."}, "logged in: gcloud auth login"),
        ({"no_type": True}, "has no v5litepod-16"),
        ({"cp_error": "403 denied"}, "cannot be written"),
    ],
)
def test_slips_are_seen_before_anything_is_created(cloud, values, words):
    scenario(cloud, **values)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 2 and words in done.err
    assert "create" not in cloud.verbs


@pytest.mark.slow
def test_a_worker_that_fails_once_is_tried_again(cloud):
    scenario(cloud, ssh_fails={"worker": 1, "numbers": [1, 3]})
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert sorted(cloud.ran) == ["a0", "a1"]


def test_a_worker_that_always_fails_is_named_and_nothing_stays(cloud):
    scenario(cloud, ssh_fails={"worker": 1})
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 1
    assert "copying failed on worker 1 of run, 4 times" in done.err
    assert cloud.ran == [] and cloud.resources == {}


def test_what_cannot_be_deleted_is_named_in_the_last_line(cloud):
    scenario(cloud, ssh_fails={"worker": 1}, delete_fails=100)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 1 and list(cloud.resources) == ["run"]
    command = done.last.partition("delete it with: ")[2]
    assert (
        command
        == "gcloud compute tpus queued-resources delete run --project=my-project --zone=us-west4-a --force --quiet"
    )
    scenario(cloud)
    subprocess.run(command, shell=True, check=True, env=cloud.environment, capture_output=True)
    assert cloud.resources == {}


COMMON = {"files": [], "bindings": [], "learning_rate": 0.1, "train_steps": 10, "seed": 0, "examples": 80}
RUN = {"name": "a", "values": {"batch_size": 8}, "batch_size": 8, **COMMON}


@pytest.mark.slow
def test_a_program_that_fails_is_started_again_while_it_makes_progress(cloud):
    code = "n = sum('checkpoint' in name for name in os.listdir(here))\n"
    code += "if host == '0' and n < 4: os.makedirs(f'{here}/checkpoint_{n}/state/_METADATA')\n"
    cloud.work(cloud.job("a", code + "sys.exit(0 if n >= 4 else 1)"), sweep={"name": "s", "axes": {}, "runs": [RUN]})
    done = cloud.launch()
    assert done.status == 0, done.err
    assert cloud.verbs.count("create") == 1


@pytest.mark.slow
def test_a_program_that_only_fails_is_given_up(cloud):
    cloud.work(cloud.job("a", "sys.exit(1)"))
    done = cloud.launch()
    assert done.status == 1 and "failed three times in a row without a newer checkpoint" in done.err
    assert "no progress: 3 attempts in a row began without a checkpoint and failed. The last error: host " in done.out
    assert cloud.ran.count("a0") == 3 and cloud.resources == {}
    assert done.out.count("\nhello of a on 0\n") == 3, "the log goes on, and is not repeated"
    assert "first error: host " in done.err and "a: error (exit code 1)" in done.err
    kept = {path.parent.name for path in (cloud.root / ".launch/run/logs").glob("*/*/host.00000.log")}
    assert kept == {"0-0000", "0-0001"}


@pytest.mark.slow
@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.PEER_LOST])
def test_hosts_that_lose_each_other_are_started_again(cloud, reason):
    code = f"first = ran('0') == 1\nsys.exit({reason.exit_code} if first else 0)"
    cloud.work(cloud.job("a", code))
    done = cloud.launch()
    assert done.status == 0, done.err
    assert sorted(cloud.ran) == ["a0", "a0", "a1", "a1"] and cloud.verbs.count("create") == 1
    assert cloud.resources == {}


@pytest.mark.slow
def test_a_slip_is_not_repeated(cloud):
    cloud.work(cloud.job("a", "print('\\nERROR: BATCH_SIZE = 3'); sys.exit(2)"))
    done = cloud.launch()
    assert done.status == 2 and "BATCH_SIZE = 3" in done.out
    assert cloud.ran.count("a0") == 1 and cloud.resources == {}


@pytest.mark.parametrize(
    "stage,number",
    [("create", signal.SIGINT), ("wait", signal.SIGINT), ("copy", signal.SIGINT), ("wait", signal.SIGTERM)],
)
def test_interrupted_before_the_program_runs(cloud, stage, number):
    scenario(
        cloud, slow_create=3 if stage == "create" else 0, states=["PROVISIONING"] if stage == "wait" else ["ACTIVE"]
    )
    cloud.work(cloud.job("a", ""))
    process = cloud.start()
    seen = {"create": "create", "wait": "describe", "copy": "ssh"}[stage]
    cloud.wait_for(lambda: "create" in cloud.verbs and seen in cloud.verbs[cloud.verbs.index("create") :])
    done = finished(process, number)
    assert done.status == 130
    assert cloud.verbs[-1] == "delete" and cloud.resources == {} and cloud.ran == []


@pytest.mark.slow
def test_interrupted_while_following_the_run_goes_on(cloud):
    cloud.work(cloud.job("a", "while not os.path.exists(cloud + '/go'): time.sleep(0.1)"))
    process = cloud.start()
    cloud.wait_for(lambda: len(cloud.ran) == 2)
    done = finished(process, signal.SIGINT)
    assert done.status == 130
    assert "launch/gcloud_tpu.py follow --name=run --project=my-project --zone=us-west4-a" in done.err
    assert done.last.startswith("still there: queued resource run") and "--force" in done.last
    assert list(cloud.resources) == ["run"]
    assert "t1v-run-w-1 running: hello of a on 1" in cloud.command("status", "--name=run").out
    # Launching again finds it: without --yes it says how to follow, with it it follows to the end.
    refused = cloud.launch(yes=False)
    assert refused.status == 2 and "is running already" in refused.err
    other = cloud.launch(name="other")
    assert other.status == 2 and "is written by the launch 'run'" in other.err
    second = cloud.start()
    cloud.wait_for(lambda: "hello of a" in second.stdout.readline())
    (cloud.folder / "go").touch()
    assert finished(second).status == 0
    assert sorted(cloud.ran) == ["a0", "a1"] and cloud.verbs.count("create") == 1
    assert cloud.resources == {}


@pytest.mark.slow
def test_stopped_by_hand(cloud):
    saves = "import signal\nsignal.signal(15, lambda n, f: (print('saved', flush=True), sys.exit(130)))\n"
    cloud.work(cloud.job("a", saves + "while not os.path.exists(cloud + '/go'): time.sleep(0.1)"))
    process = cloud.start()
    cloud.wait_for(lambda: len(cloud.ran) == 2)
    assert cloud.command("stop", "--name=run").status == 0
    done = finished(process)
    assert done.status == 130 and "saved" in done.out
    assert "the program was stopped" in done.err and done.last.startswith("still there: ")
    followed = cloud.command("follow", "--name=run")
    assert followed.status == 130 and "hello of a on 0" in followed.out and followed.last.startswith("still there: ")
    assert cloud.command("list").out.startswith("run  ACTIVE  1 slice(s)  commit 0123456789ab")
    refused = cloud.command("delete_all")
    assert refused.status == 2 and "Give --yes" in refused.err and cloud.resources
    (cloud.folder / "go").touch()
    again = cloud.launch()
    assert again.status == 0 and "it is restarted" in again.err, again.err
    assert sorted(cloud.ran) == ["a0", "a0", "a1", "a1"] and cloud.verbs.count("create") == 1
    assert cloud.resources == {}


@pytest.mark.slow
def test_delete_all(cloud):
    cloud.work(cloud.job("a", ""))
    assert cloud.launch(keep=True).last.startswith("still there: queued resource run")
    assert cloud.command("delete_all", "--yes").status == 0
    assert cloud.resources == {}


@pytest.mark.slow
def test_another_launch_was_faster(cloud):
    scenario(cloud, race=True, states=["ACTIVE"])
    cloud.work(cloud.job("a", ""))
    done = cloud.launch(yes=False)
    assert done.status == 2, done.err  # no terminal: asked before creating
    done = cloud.launch()
    assert done.status == 0, done.err
    assert cloud.verbs.count("create") == 1 and "exists already: ACTIVE" in done.err
    assert sorted(cloud.ran) == ["a0", "a1"] and cloud.resources == {}


@pytest.mark.slow
def test_two_names_for_one_folder_at_the_same_moment(cloud):
    scenario(cloud, rival=True)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 2 and "is written by the launch 'rival'" in done.err
    assert list(cloud.resources) == ["rival"] and cloud.ran == []


@pytest.mark.slow
def test_created_by_the_step_alone_then_launched(cloud):
    there(cloud, states=["PROVISIONING", "ACTIVE"])
    cloud.work(cloud.job("a", ""))
    done = cloud.launch(max_restarts=0)
    assert done.status == 0, done.err
    assert sorted(cloud.ran) == ["a0", "a1"] and cloud.resources == {} and "create" not in cloud.verbs


@pytest.mark.parametrize(
    "more,values,words",
    [
        ({"states": ["PROVISIONING", "FAILED"]}, {"failed": "no more capacity"}, "still there: queued resource run"),
        ({}, {"ssh_fails": {"worker": 1}}, "still there: queued resource run"),
        ({}, {"cp_error": "HTTPError 403"}, "still there: queued resource run"),
        ({"nodes": ["run-0", "run-1"]}, {}, "use --slices=2 to follow it"),
    ],
)
def test_what_was_found_is_named_where_it_cannot_be_joined(cloud, more, values, words):
    there(cloud, **more)
    scenario(cloud, **values)
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status in (1, 2) and words in done.last, done.err
    assert list(cloud.resources) == ["run"]


def test_delete_says_what_it_did(cloud):
    done = cloud.command("delete", "--name=nothing")
    assert done.status == 0 and done.err.strip() == "there is no queued resource nothing (my-project, us-west4-a)"


def test_a_full_disk_is_no_stack_trace(cloud):
    (cloud.folder / "prepared").write_text("no folder can be made here")
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == 1 and "ERROR: " in done.err and "create" not in cloud.verbs


@pytest.mark.parametrize(
    "labels,state,status,words",
    [
        pytest.param(
            {"perex-name": "run", "perex-run": "OURS"},
            "FAILED",
            0,
            "it is deleted and created again",
            marks=pytest.mark.slow,
        ),
        ({"perex-name": "run", "perex-run": "00000000"}, "ACTIVE", 2, "another folder"),
        ({}, "ACTIVE", 2, "not created by a launch"),
    ],
)
def test_what_is_there_already(cloud, labels, state, status, words):
    from perex_t5x.launching.names import fingerprint

    labels = {k: fingerprint("gs://my-bucket/x") if v == "OURS" else v for k, v in labels.items()}
    found = {"states": [state], "labels": labels, "nodes": ["run"], "type": "v5litepod-16"}
    (cloud.folder / "state.json").write_text(json.dumps({"resources": {"run": found}, "counts": {}}))
    cloud.work(cloud.job("a", ""))
    done = cloud.launch()
    assert done.status == status and words in done.err
    assert list(cloud.resources) == ([] if status == 0 else ["run"])


@pytest.mark.slow
def test_a_sweep_is_collected_for_the_report(cloud):
    metrics = (
        "import json\nif host == '0':\n  with open(here + '/metrics.jsonl', 'w') as f:\n    for s in (5, 10):\n"
        "      for n in ('train', 'training_eval/t'):\n        f.write(json.dumps({'name': n, 'step': s, "
        "'loss_per_nonpadding_target_token': 3 - s / 10}) + '\\n')\n  os.makedirs(here + '/checkpoint_10', exist_ok=True)\n"
        "  open(here + '/checkpoint_10/x', 'w')\n"
    )
    status = {"reason": "diverged", "exit_code": 5, "step": 7, "finding": "the loss is nan"}
    diverges = f"{metrics}open(os.environ['PEREX_T5X_STATUS_FILE'], 'w').write(json.dumps({status}))\nsys.exit(5)"
    runs = [{"name": n, "values": {"batch_size": b, "rule": n}, "batch_size": b, **COMMON} for n, b in
            (("a", 8), ("twin", 8), ("b", 16))]  # fmt: skip
    sweep = {"name": "s", "axes": {"batch_size": [8, 16]}, "runs": runs}
    cloud.work(cloud.job("a", metrics), cloud.job("b", diverges), sweep=sweep, twins={"twin": "a"})
    done = cloud.launch()
    assert done.status == 0, done.err
    assert "some of them failed" in done.err
    rows = (cloud.folder / "out/results.csv").read_text().splitlines()
    assert rows[0].startswith("name,status,rule,batch_size")
    assert [row.split(",")[:2] for row in rows[1:]] == [["a", "done"], ["twin", "done"], ["b", "failed"]]
    assert "diverged at step 7" in rows[3] and ",2.0,2.0," in rows[1]
    assert not list((cloud.folder / "out").rglob("checkpoint_*"))
    again = cloud.command("collect", "--name=run", "--dir=gs://my-bucket/x", f"--out={cloud.folder}/second")
    assert again.status == 0
    assert (cloud.folder / "second/results.csv").read_text().splitlines() == rows


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("delete", "--name=$(touch x)"), "a name has at most 40"),
        (("follow", "--name=a b"), "such as --name=a-b"),
        (("status",), "--name is missing"),
        (("status", "--name=nothing"), "there is no queued resource nothing"),
        (("stat", "--name=a"), "Did you mean 'start'"),
        (("collect", "--name=a"), "Give --dir=gs://"),
        (("list", "--spot", "--reserved"), "--reserved excludes --spot"),
    ],
)
def test_slips_of_commands(cloud, arguments, words):
    done = cloud.command(*arguments)
    assert done.status == 2 and words in done.err
    assert not list(cloud.folder.rglob("x"))


def test_the_stand_in_refuses_what_gcloud_would(cloud):
    for argv in (["compute", "tpus", "queued-resources", "create", "a", "--zones=x"], ["compute", "tpu", "list"]):
        done = subprocess.run(["gcloud", *argv], env=cloud.environment, capture_output=True, text=True)
        assert done.returncode == 2 and "ERROR" in done.stderr


@pytest.mark.slow
def test_the_whole_command_in_a_dry_run(cloud):
    run = ["--gin_file=models/nano.gin", "--gin_file=meshes/v5e_16.gin", "--sweep=sweeps/sqrt_lr.gin"]
    argv = [sys.executable, str(ROOT / "launch/gcloud_tpu.py"), "--dry_run", *run, "--dir=gs://my-bucket/x", "--name=a",
            "--gin_file=runs/pretrain.gin", "--allow_uncommitted", "--project=my-project", "--zone=us-west4-a"]  # fmt: skip
    done = subprocess.run(argv, env=cloud.environment, capture_output=True, text=True, cwd=cloud.folder)
    assert done.returncode == 0, done.stderr
    assert cloud.commands == []
    assert done.stdout.splitlines()[-1].startswith("gcloud compute tpus queued-resources delete a ")
