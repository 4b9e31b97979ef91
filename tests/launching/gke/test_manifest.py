"""The JobSets that launch/gke.py makes: what a cluster would say to them, and what they ask of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess

import pytest
import yaml

from perex_t5x.errors import ConfigError, Reason
from perex_t5x.launching.gke import manifest
from perex_t5x.launching.gke.manifest import Shape
from tests.launching.gke.schemas.rules import problems

COMMAND = ["python", "-m", "perex_t5x.launching.worker", "--jobs=/etc/perex/jobs.json"]
PATHS = ["jobs.json", "gin/runs/mine.gin"]
V5E_256 = Shape(
    name="sqrt-lr",
    group="sqrt-lr",
    run="1234e567",
    launch="00c0ffee",
    image="europe-docker.pkg.dev/project/perex/perex:1a2b3c4",
    accelerator="tpu-v5-lite-podslice",
    topology="16x16",
    hosts=64,
    chips_per_host=4,
)


def changed(**values) -> Shape:
    return dataclasses.replace(V5E_256, **values)


SHAPES = {
    "one slice": V5E_256,
    "one host": changed(topology="2x4", hosts=1, chips_per_host=8),
    "two slices": changed(slices=2),
    "spot": changed(spot=True),
    "reservation": changed(reservation="our-v5e"),
    "kueue": changed(queue="multislice-queue", priority="high"),
    "all": changed(service_account="perex", host_network=True, slices=16, namespace="team-a", max_restarts=0),
    "not privileged": changed(privileged=False),
    "secrets": changed(secrets={"HF_TOKEN": "hf/token", "WANDB_API_KEY": "w.b:key.1"}),
    "longest name": changed(name="a" * 40, group="a" * 40, slices=16),
}


def made(shape: Shape) -> dict:
    return manifest.jobset(shape, COMMAND, PATHS)


def made_map(shape: Shape, owner: str | None = None) -> dict:
    return manifest.config_map(shape, dict.fromkeys(PATHS, "x"), owner)


def pod_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_cluster_accepts_it(shape):
    assert problems(made(shape)) == []
    for owner in (None, "0d1e"):
        assert problems(made_map(shape, owner)) == []


def test_a_launch_mounts_its_own_files_alone():
    ours, theirs = V5E_256, changed(launch="0badcafe")
    for shape in (ours, theirs):
        assert pod_of(made(shape))["volumes"][0]["configMap"]["name"] == made_map(shape)["metadata"]["name"]
    assert made_map(ours)["metadata"]["name"] != made_map(theirs)["metadata"]["name"]


def _job(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


MISTAKES = {
    "misspelt field of the set": lambda m: m["spec"].update(ttlSecondAfterFinished=3),
    "misspelt field of the job": lambda m: _job(m).update(backofLimit=0),
    "misspelt field of the pod": lambda m: pod_of(m).update(nodeSelectors={}),
    "python's spelling": lambda m: pod_of(m).update(host_network=True),
    "string for a number": lambda m: _job(m).update(parallelism="64"),
    "number for a string": lambda m: pod_of(m)["containers"][0]["env"].append({"name": "A", "value": 1}),
    "number of chips as a number": lambda m: pod_of(m)["containers"][0]["resources"]["limits"].update(memory=1),
    "wrong api": lambda m: m.update(apiVersion="jobset.x-k8s.io/v1"),
    "no template": lambda m: m["spec"]["replicatedJobs"][0].pop("template"),
    "unknown strategy": lambda m: m["spec"]["failurePolicy"].update(restartStrategy="Blocking"),
    "unknown action": lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
    "unknown reason": lambda m: m["spec"]["failurePolicy"]["rules"][0].update(onJobFailureReasons=["ExitCode"]),
    "name of a rule": lambda m: m["spec"]["failurePolicy"]["rules"][0].update(name="final-exit"),
    "unknown pod action": lambda m: _job(m)["podFailurePolicy"]["rules"][0].update(action="FailJobSet"),
    "unsorted exit codes": lambda m: _job(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[3, 2]),
    "exit code 0": lambda m: _job(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[0, 2]),
    "unknown container": lambda m: _job(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(containerName="x"),
    "restart policy": lambda m: pod_of(m).update(restartPolicy="OnFailure"),
    "name with capitals": lambda m: m["metadata"].update(name="Sqrt"),
    "name of 50 characters": lambda m: m["metadata"].update(name="a" * 50),
    "label of 64 characters": lambda m: m["metadata"]["labels"].update({"perex-name": "a" * 64}),
    "label with a space": lambda m: pod_of(m)["nodeSelector"].update({"cloud.google.com/gke-spot": "a b"}),
    "no such volume": lambda m: pod_of(m)["volumes"].pop(0),
    "fewer chips than the limit": lambda m: pod_of(m)["containers"][0]["resources"]["requests"].update(
        {"google.com/tpu": "1"}
    ),
}


@pytest.mark.parametrize("spoil", MISTAKES.values(), ids=MISTAKES)
def test_the_validation_refuses_usual_mistakes(spoil):
    jobset = copy.deepcopy(made(V5E_256))
    spoil(jobset)
    assert problems(jobset)


def test_one_job_a_slice_and_one_pod_a_host():
    jobset = made(changed(slices=3))
    replicated = jobset["spec"]["replicatedJobs"][0]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == 3
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (64, 64, "Indexed")
    assert pod_of(jobset)["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod_of(jobset)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
    }


def test_slices_of_several_hosts_have_a_node_pool_to_themselves():
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert made(V5E_256)["metadata"]["annotations"] == {key: "cloud.google.com/gke-nodepool"}
    # Nodes of one pool, each a slice: several jobs may share it.
    assert "annotations" not in made(SHAPES["one host"])["metadata"]


def test_without_privileges_the_command_is_the_same_after_the_limit_is_raised():
    command = pod_of(made(changed(privileged=False)))["containers"][0]["command"]
    assert command[-len(COMMAND) :] == COMMAND
    ran = subprocess.run([*command[:4], "printf", "%s|", "a b", "$(x)"], capture_output=True, text=True)
    assert ran.stdout == "a b|$(x)|"


def test_slices_are_told_of_each_other_and_a_single_one_is_not():
    def environment(shape):
        return {env["name"]: env.get("value") for env in pod_of(made(shape))["containers"][0]["env"]}

    assert not any(name.startswith("MEGASCALE") for name in environment(V5E_256))
    two = environment(changed(slices=2))
    assert two["MEGASCALE_NUM_SLICES"] == "2"
    assert two["MEGASCALE_COORDINATOR_ADDRESS"] == "sqrt-lr-slice-0-0.sqrt-lr"
    assert "MEGASCALE_SLICE_ID" in two


def test_pods_know_their_attempt_and_get_no_token_of_the_cluster():
    pod = pod_of(made(changed(secrets={"HF_TOKEN": "hf/token"})))
    assert pod["automountServiceAccountToken"] is False
    environment = {env["name"]: env.get("valueFrom") for env in pod["containers"][0]["env"]}
    assert environment["PEREX_T5X_ATTEMPT"] == {
        "fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}
    }
    assert environment["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


def test_new_pods_wait_until_the_former_ones_are_gone():
    assert made(V5E_256)["spec"]["failurePolicy"]["restartStrategy"] == "BlockingRecreate"


def _outcome(jobset: dict, exit_code: int | None) -> str:
    """What Job and JobSet controllers do with a pod that ends so; None is an eviction."""
    job, reason = _job(jobset), "BackoffLimitExceeded"
    for rule in job["podFailurePolicy"]["rules"]:
        if exit_code in rule["onExitCodes"]["values"]:
            assert rule["action"] == "FailJob"
            reason = "PodFailurePolicy"
    assert job["backoffLimit"] == 0
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("exit_code", "action"),
    [(1, "RestartJobSet"), (2, "FailJobSet"), (3, "FailJobSet"), (130, "RestartJobSet"), (137, "RestartJobSet")],
)
def test_restarts_by_exit_code(exit_code, action):
    assert _outcome(made(V5E_256), exit_code) == action
    assert _outcome(made(V5E_256), None) == "RestartJobSet"


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.DONE])
def test_only_ends_that_would_repeat_themselves_are_final(reason):
    final = reason in ("configuration", "some_failed", "diverged", "no_progress", "stopped")
    assert _outcome(made(V5E_256), reason.exit_code) == ("FailJobSet" if final else "RestartJobSet")
    assert not (final and reason.retryable)


def test_kueue_gets_its_label_and_suspends_by_itself():
    jobset = made(changed(queue="multislice-queue", priority="high"))
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
    assert "suspend" not in jobset["spec"]
    assert pod_of(jobset)["priorityClassName"] == "high"
    assert "kueue.x-k8s.io/queue-name" not in made(V5E_256)["metadata"]["labels"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "a" * 47}, "too long"),
        ({"name": "$(touch x)"}, "--name"),
        ({"image": "perex:1; rm -rf /"}, "--image"),
        ({"queue": "q'; x"}, "--queue"),
        ({"service_account": "a b"}, "--service_account"),
        ({"namespace": "Team"}, "--namespace"),
        ({"reservation": "`x`"}, "--reservation"),
        ({"slices": 2, "hosts": 1, "topology": "2x4"}, "several hosts"),
        ({"spot": True, "reservation": "r"}, "exclude"),
        ({"max_restarts": -1}, "--max_restarts"),
        ({"max_restarts": 2**31}, "--max_restarts"),
        ({"ttl_seconds": 10**30}, "--ttl_hours"),
        ({"namespace": "team.a"}, "--namespace"),
        ({"secrets": {"A": "hf"}}, "--secret A=hf"),
        ({"secrets": {"A": "Hf/token"}}, "SECRET/KEY"),
    ],
)
def test_slips_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        changed(**values)


def test_all_slips_at_once():
    with pytest.raises(ConfigError) as e:
        changed(name="A", queue="B", slices=0)
    assert all(flag in str(e.value) for flag in ("--name", "--queue", "--slices"))


def test_files_arrive_where_they_belong():
    given = {"jobs.json": json.dumps([{"argv": ["--gin.X='$(touch /tmp/x)'"]}]), "gin/runs/mine.gin": "A = 1\n"}
    config_map = manifest.config_map(V5E_256, given, "uid")
    assert problems(config_map) == []
    mounted = {item["path"]: config_map["data"][item["key"]] for item in manifest.mounted_items(list(given))}
    assert mounted == given
    assert config_map["metadata"]["ownerReferences"][0]["uid"] == "uid"
    assert config_map["metadata"]["name"] == "sqrt-lr-00c0ffee"


def test_too_many_files_are_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"large\.gin.*--jobsets"):
        manifest.config_map(V5E_256, {"large.gin": "#" * (1 << 20), "jobs.json": "[]"})
    with pytest.raises(ConfigError, match="cannot be sent"):
        manifest.config_map(V5E_256, {"../secret.gin": ""})


def test_yaml_reads_back_as_it_was_meant():
    objects = [made(SHAPES["all"]), manifest.config_map(changed(namespace="b"), {"x": "a: 'b'\n# $(c)\n", "y": "1e5"})]
    written = manifest.as_yaml(objects)
    assert list(yaml.safe_load_all(written)) == objects
    assert 'perex-run: "1234e567"' in written  # plainly written, Kubernetes would read a float
