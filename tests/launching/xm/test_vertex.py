"""XManager's Vertex executor: jobs for the chips it knows, a way out for the others. Nothing is sent: its client is ours."""

import _thread
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("xmanager")

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching.shell import Commands, Completed
from perex_t5x.launching.spec import Job, Work
from perex_t5x.launching.xm import command, experiment, vertex
from tests.launching.xm.test_local import xmanager

IMAGE = "europe-docker.pkg.dev/my-project/perex/perex:1ced5d4"
RUN = ("--gin_file=models/nano.gin", "--gin_file=runs/pretrain.gin", "--gin_file=optimizers/adamw.gin")
TASK = (
    "--gin.MIXTURE_OR_TASK_NAME='python_stdlib_lm'",
    "--gin.TASK_FEATURE_LENGTHS={'targets': 16}",
    "--gin.TRAIN_STEPS=5",
)


class Client:
    """In the place of XManager's client: keeps what would be sent, and fails at the job `fails`."""

    def __init__(self, fails=None):
        self.sent, self.cancelled, self.fails, self.state = [], [], fails, "RUNNING"

    def launch(self, name, jobs):
        from xmanager import xm
        from xmanager.cloud import vertex as client
        from xmanager.xm import utils

        [job] = jobs
        if len(self.sent) + 1 == self.fails:
            raise RuntimeError("429 The following quotas are exceeded: CustomModelTrainingTPUV3PodSlice")
        args = xm.merge_args(job.executable.args, job.args).to_list(utils.ARGV_ESCAPER)
        self.sent.append((client.get_machine_spec(job), job.executable.image_path, args))
        return f"projects/1/locations/us-central1/customJobs/{len(self.sent)}"

    def get_state(self, name):
        from google.cloud import aiplatform_v1

        return aiplatform_v1.JobState[f"JOB_STATE_{self.state}"]


@pytest.fixture
def client(tmp_path, monkeypatch):
    from absl import flags
    from xmanager.cloud import vertex as xm_vertex
    from xmanager.xm_local.storage import database

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GOOGLE_CLOUD_BUCKET_NAME", "")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    caches = (database.database, database.db_settings, database.db_connector)
    for cached in caches:
        cached.cache_clear()
    made = Client()
    monkeypatch.setattr(xm_vertex, "_default_client", made)
    yield made
    for cached in caches:
        cached.cache_clear()


def work(*names):
    return Work("a", "gs://bucket/a", tuple(Job(n, ("-m", "m", f"--x={n} 'y'"), f"gs://bucket/a/{n}") for n in names))


def create(client, *names, title="a gs://bucket/a"):
    modules = experiment.modules()
    made = vertex.make_jobs(modules, work(*names), IMAGE, "tpu_v3")
    return vertex.create_jobs(modules[1], title, "gs://bucket/a", made, Commands(), "my-project")


def test_a_custom_job_for_every_run(client, capsys):
    assert create(client, "one", "two") == 0
    spec, image, args = client.sent[1]
    assert spec["machine_type"] == "cloud-tpu" and spec["accelerator_count"] == 8
    assert spec["accelerator_type"].name == "TPU_V3" and image == IMAGE
    assert args == ["python", "-m", "m", "--x=two 'y'"]
    said = capsys.readouterr().out
    assert "customJobs/2" in said and "Press Ctrl+C" not in said


def test_launched_again_the_running_one_is_found(client):
    create(client, "one")
    with pytest.raises(ConfigError, match=r"(?s)launched already.*stream-logs projects/1/.*customJobs/1"):
        create(client, "one")
    client.state = "SUCCEEDED"
    assert create(client, "one") == 0


def test_what_was_created_before_a_failure_is_cancelled(client, monkeypatch, capsys):
    client.fails = 2
    given = []
    monkeypatch.setattr(Commands, "run", lambda self, argv, **_: given.append(argv) or SimpleNamespace(returncode=0))
    with pytest.raises(TrainingError, match="quotas are exceeded"):
        create(client, "one", "two")
    assert given == [tuple(vertex.cancel_command("projects/1/locations/us-central1/customJobs/1"))]


def test_ctrl_c_while_a_job_is_created_cancels_it_too(client, monkeypatch, capsys):
    cancelled, launch = [], client.launch
    monkeypatch.setattr(
        Commands, "run", lambda self, argv, **_: cancelled.append(argv[4]) or SimpleNamespace(returncode=0)
    )

    def interrupted(name, jobs):
        if client.sent:
            _thread.interrupt_main()
            time.sleep(0.3)
        return launch(name, jobs)

    monkeypatch.setattr(client, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create(client, "one", "two", "three")
    assert len(client.sent) == 2 and [name[-1] for name in cancelled] == ["2", "1"]


def test_other_chips_have_a_way_out(monkeypatch):
    argv = ["xm_launch.py", "--executor=vertex", "--topology=v5e:16x16", "--gin.A='b c'", f"--image={IMAGE}"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(ConfigError) as e:
        vertex.kind_of("v5e:16x16", SimpleNamespace(image=IMAGE))
    first, second = [shlex.split(line) for line in str(e.value).splitlines()[1:]]
    assert first == ["./launch/gcloud_tpu.py", "--topology=v5e:16x16", "--gin.A='b c'"]
    assert second == ["./launch/gke.py", "--topology=v5e:16x16", "--gin.A='b c'", f"--image={IMAGE}"]


@pytest.mark.parametrize(
    ("topology", "words"), [("v3-32", "one host"), (None, "--topology is missing"), ("v9-1", "v2-8 and v3")]
)
def test_topologies_that_are_refused(topology, words):
    with pytest.raises(ConfigError, match=words):
        vertex.kind_of(topology, SimpleNamespace(image=IMAGE))


def test_the_command_names_the_way_out(tmp_path):
    done = xmanager(tmp_path, "--executor=vertex", "--topology=v5e-256", *RUN, "--gin.MODEL_DIR='gs://b/c'")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "  ./launch/gcloud_tpu.py --topology=v5e-256 --gin_file=models/nano.gin" in done.stderr


def test_a_sweeps_name_is_made_to_fit_as_by_the_other_launchers(monkeypatch, capsys):
    made = Work("learning_rate", "gs://bucket/a", work("one").jobs, sweep={})
    monkeypatch.setattr(vertex.spec, "make", lambda args: made)
    absent = dict.fromkeys(("name", "project", "spot", "reservation", "slices", "zone", "repository"))
    args = SimpleNamespace(
        topology="v3-8", image=IMAGE, dry_run=True, with_package=[], yes=True, skip_gin_check=False, **absent
    )
    assert vertex.launch(args) == 0
    assert "name      learning-rate" in capsys.readouterr().err


def test_the_gin_check_gets_what_it_reads_of_a_request(monkeypatch, tmp_path):
    """Vertex's chips are no `Slice`, so there is no `Request`, only what the checks need of one."""
    monkeypatch.setattr(vertex.spec, "make", lambda args: work("one"))
    given = []

    def run(self, argv, **_):
        given.append(argv)
        return Completed(tuple(argv), 2, "BATCH_SIZE = 3", "")

    monkeypatch.setattr(Commands, "run", run)
    absent = dict.fromkeys(("name", "project", "spot", "reservation", "slices", "zone", "repository"))
    args = SimpleNamespace(topology="v3-8", image=IMAGE, dry_run=False, with_package=[], yes=True, **absent)
    args.skip_gin_check = False
    with pytest.raises(ConfigError, match="BATCH_SIZE = 3"):
        vertex.launch(args)
    assert given[-1][-1] == "--devices=8" and "perex_t5x.launching.checks" in given[-1]


@pytest.mark.slow
def test_the_command_checks_and_creates_nothing_in_a_dry_run(tmp_path):
    done = xmanager(
        tmp_path,
        "--executor=vertex",
        "--topology=v3-8",
        *RUN,
        *TASK,
        "--gin.MODEL_DIR='gs://bucket/runs/one'",
        f"--image={IMAGE}",
        "--dry_run",
    )
    assert done.returncode == 0, done.stderr
    assert "one run on one TPU v3-8, into gs://bucket/runs/one" in done.stderr
    assert not (tmp_path / ".xmanager").exists()


def test_gke_is_handed_over(tmp_path, monkeypatch):
    script = tmp_path / "launch" / "gke.py"
    script.parent.mkdir()
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    (tmp_path / "perex_t5x").mkdir()
    code = (
        "import sys; from perex_t5x.launching.xm import command; import perex_t5x;"
        f"perex_t5x.__file__ = {str(tmp_path / 'perex_t5x' / '__init__.py')!r};"
        "sys.argv = ['xmanager', 'launch', 'xm_launch.py', '--', '--executor=gke', '--gin.A=$(x)', '--queue=q'];"
        "command.hand_over_to_gke()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.strip() == "['--gin.A=$(x)', '--queue=q']"


def test_flags_that_are_not_handed_over():
    argv = ["xm_launch.py", "--executor", "gke", "--nofollow", "--yes", "--parallel=2", "--sweep.seeds=[0]"]
    assert command.given(argv) == ["--yes", "--sweep.seeds=[0]"]
