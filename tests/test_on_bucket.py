"""Whole runs with MODEL_DIR=gs://..., against the stand-in for Cloud Storage."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributed import support


def closure(extra: str) -> set[str]:
    """Names of the distributions that `pip install perex_t5x[extra]` brings; our own from pyproject.toml."""
    project = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["project"]
    seen: set[tuple[str, str]] = set()
    todo = [(canonicalize_name(project["name"]), extra)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        if name == canonicalize_name(project["name"]):
            needed = project["optional-dependencies"][wanted] if wanted else project["dependencies"]
        else:
            try:
                needed = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
        for text in needed:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                todo += [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]
    return {name for name, _ in seen}


def modules_of(distribution: importlib.metadata.Distribution) -> set[str]:
    """Its packages and modules that are in no other package of its own: google.cloud.storage, not google."""
    files = [f for f in distribution.files or () if f.suffix in (".py", ".so") and ".." not in f.parts]
    packages = {f.parts[:-1] for f in files if f.name == "__init__.py"}
    roots = {p for p in packages if not any(p[:i] in packages for i in range(1, len(p)))}
    single = {(f.name.split(".")[0],) for f in files if len(f.parts) == 1}
    return {".".join(parts) for parts in roots | single if parts}


def not_on_hosts() -> list[str]:
    """Modules on this machine that hosts, installed with perex_t5x[tpu], do not have."""
    theirs = closure("tpu")
    here = [(canonicalize_name(d.metadata["Name"]), modules_of(d)) for d in importlib.metadata.distributions()]
    allowed = {module for name, modules in here if name in theirs for module in modules}
    ours = {"perex_t5x", "tests"}
    return sorted({module for _, modules in here for module in modules} - allowed - ours)


def test_what_hosts_have():
    blocked = not_on_hosts()
    assert {"google.cloud.storage_control_v2", "pytest", "pre_commit", "vl_convert"} <= set(blocked)
    assert not {"google.cloud.storage", "tensorflow", "orbax.checkpoint", "jax", "numpy", "google.protobuf"} & set(
        blocked
    )


def test_a_run_in_a_bucket(cloud_storage, tmp_path):
    (tmp_path / "blocked.json").write_text(json.dumps(not_on_hosts()))
    folder = f"{cloud_storage.bucket}/runs/a"
    command = [sys.executable, "-m", "tests.on_bucket", folder, str(tmp_path / "local"), str(tmp_path / "blocked.json")]
    done = subprocess.run(
        command, env=support.environment(**cloud_storage.environment), cwd=support.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert "Stopped at step 3 of 6; checkpoint_3 is saved in gs://" in result["farewell"]
    assert result["saved"] == ["checkpoint_3"]  # keep = 1: the one of step 2 is gone
    assert result["newest"] == f"{folder}/checkpoint_3" and result["last"] == 6
    assert result["kept"] == ["checkpoint_6"]
    remote, local = result["losses"]
    assert remote == local and list(remote) == [str(i) for i in range(1, 7)]
    assert list(result["eval"]) == ["6"] and len(result["infer"].splitlines()) == 20
    objects = cloud_storage.objects("runs/a/")
    assert not [name for name in objects if "/checkpoint_" in name and "/checkpoint_6/" not in name]
    for name in (
        "config.gin",
        "model-info.txt",
        "checkpoint_6/commit_success.txt",
        "eval/metrics.jsonl",
        "hlo/step.optimized_hlo.txt",
    ):
        assert f"runs/a/{name}" in objects
    assert len([name for name in objects if "/train/events" in name]) == 2  # of the first start as well
    assert len([name for name in objects if "/goodput/" in name and name.endswith(".json")]) == 2
    for part in ("profile/plugins/profile/", "train/events", "training_eval/", "inference_eval/", ".xplane.pb"):
        assert any(part in name for name in objects), part
    assert not [name for name in objects if name.endswith(".tmp") or ".access_" in name]


@pytest.mark.slow
def test_two_processes_with_a_streaming_feed(cloud_storage):
    """SIGTERM after the first checkpoint; both processes save at the same step, and resume from there."""
    folder, first = f"{cloud_storage.bucket}/two", "two/checkpoint_4/commit_success.txt"
    bindings = (
        "utils.SaveCheckpointConfig.period = 4",
        "utils.SaveCheckpointConfig.keep = 2",
        "train/utils.DatasetConfig.feed = 'streaming'",
        "train_eval/utils.DatasetConfig.feed = 'streaming'",
    )
    options = {"processes": 2, "devices": 2, "timeout": 300, **cloud_storage.environment}
    process = support.launch(*support.train_arguments(folder, "TRAIN_STEPS = 100000", *bindings), grace=100, **options)
    try:
        while process.poll() is None and first not in cloud_storage.objects():
            time.sleep(0.2)
        process.terminate()
        printed = process.communicate(timeout=150)[0]
    finally:
        process.kill()
    status = json.loads(cloud_storage.get("two/status.json"))
    step = status["step"]
    assert status["reason"] == "interrupted" and step >= 4, printed
    saved = cloud_storage.objects(f"two/checkpoint_{step}/")
    assert f"two/checkpoint_{step}/commit_success.txt" in saved
    assert len([name for name in saved if re.search(r"/data/.*[01]", name)]) >= 2, (
        saved
    )  # a state of the stream for each
    arguments = support.train_arguments(folder, f"TRAIN_STEPS = {step + 3}", *bindings)
    code, printed = support.run(*arguments, **options)
    assert code == 0, printed
    assert json.loads(cloud_storage.get("two/status.json"))["reason"] == "done"
    assert f"two/checkpoint_{step + 3}/commit_success.txt" in cloud_storage.objects()
    assert f"two/checkpoint_{step}/commit_success.txt" in cloud_storage.objects()  # the run did not start from scratch
    assert (
        len([name for name in cloud_storage.objects() if re.fullmatch(r"two/checkpoint_\d+/commit_success.txt", name)])
        == 2
    )


@pytest.mark.slow
def test_installed_exactly_as_hosts_are(cloud_storage, tmp_path):
    """The wheel with [tpu] under the constraints, in a new environment; the training is its own `python -m`."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    wheels = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(support.ROOT)]
    subprocess.run(wheels, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("perex_t5x-*.whl")
    constraints = str(support.ROOT / "constraints.txt")
    install = [python, "-m", "pip", "install", "--quiet", "-c", constraints, f"perex_t5x[tpu] @ file://{wheel}"]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "books").mkdir()
    for i in range(20):
        (tmp_path / "books" / f"{i}.txt").write_text(f"All work and no play {i} makes a dull book. " * 40)
    folder = f"{cloud_storage.bucket}/host"
    bindings = {
        "MODEL_DIR": repr(folder), "MIXTURE_OR_TASK_NAME": "'text_files_lm'", "TASK_FEATURE_LENGTHS": "{'targets': 16}",
        "tasks.register_text_files.glob": repr(f"{tmp_path}/books/*.txt"), "BATCH_SIZE": "8", "EVAL_STEPS": "1",
        "models.T5Config.emb_dim": "32", "models.T5Config.mlp_dim": "64", "models.T5Config.num_heads": "4",
        "models.T5Config.head_dim": "8", "utils.SaveCheckpointConfig.period": "2", "utils.SaveCheckpointConfig.keep": "1",
    }  # fmt: skip
    files = ["--gin_file=models/tiny.gin", "--gin_file=runs/pretrain.gin"]
    for steps in (3, 5):
        given = [f"--gin.{name}={value}" for name, value in {**bindings, "TRAIN_STEPS": str(steps)}.items()]
        environment = {**os.environ, **cloud_storage.environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
        command = [python, "-m", "perex_t5x.train", *files, *given]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(cloud_storage.get("host/status.json"))["reason"] == "done"
        whole = [
            name for name in cloud_storage.objects("host/checkpoint_") if name.count("/") == 2 and "commit" in name
        ]
        assert whole == [f"host/checkpoint_{steps}/commit_success.txt"]
