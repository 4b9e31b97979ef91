"""--env, --libtpu_args and --secret: what is refused, and what the jobs get."""

import json
import os
import subprocess
import sys

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.launching import environment, worker
from perex_t5x.launching.environment import LIBTPU, Environment
from perex_t5x.launching.spec import Job, Work


@pytest.mark.parametrize(
    "given,message",
    [
        ({"env": ["A"]}, "--env A has no equals sign"),
        ({"env": ["a b=1"]}, "'a b' is not the name"),
        ({"env": ["1A=1"]}, "is not the name"),
        ({"env": ["=1"]}, "is not the name"),
        ({"env": ["A=1", "A=2"]}, "given twice"),
        ({"env": [f"{LIBTPU}=--a=1"]}, "use --libtpu_args"),
        ({"env": ["TPU_WORKER_ID=1"]}, "reserved, the hosts of a slice find each other by it"),
        ({"env": ["MEGASCALE_SLICE_ID=1"]}, "reserved"),
        ({"env": ["PEREX_T5X_HOST=1"]}, "the launch sets it itself"),
        ({"env": ["JAX_PROCESS_ID=1"]}, "reserved"),
        ({"env": ["HF_TOKEN=12345678"]}, "--secret HF_TOKEN=REFERENCE .*--not_secret=HF_TOKEN"),
        ({"env": ["WANDB_API_KEY=12345678"]}, "looks like a secret"),
        ({"env": ["db_password=12345678"]}, "looks like a secret"),
        ({"env": ["A=\0"]}, "zero byte"),
        ({"libtpu_args": ["xla_a=1"]}, "'xla_a=1' is not a flag"),
        ({"secret": ["HF_TOKEN"]}, "has no equals sign. Write --secret NAME=REFERENCE"),
        ({"secret": ["HF_TOKEN="]}, "the reference is missing"),
        ({"secret": ["A=s", "A=t"]}, "given twice"),
        ({"secret": ["A=s"], "env": ["A=1"]}, "--env sets the same"),
        ({"secret": [f"{LIBTPU}=s"]}, "--libtpu_args sets the same"),
        ({"secret": ["TPU_NAME=s"]}, "reserved"),
    ],
)
def test_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Environment.parse(**given)


@pytest.mark.parametrize(
    "value",
    ["hf_abcdefghijklmnopqrst", "0123456789abcdef0123456789abcdef01234567", "pass word!", "sk-abcdefghijklmnopqrst"],
)
def test_the_value_of_a_secret_is_refused_and_never_shown(value):
    for given in (f"HF_TOKEN={value}", value):
        with pytest.raises(ConfigError) as e:
            Environment.parse(secret=[given])
        assert value not in str(e.value)


def test_what_is_accepted():
    env = [
        "TOKENIZERS_PARALLELISM=false",
        "TPU_STDERR_LOG_LEVEL=0",
        "TPU_PREMAPPED_BUFFER_SIZE=1",
        "EMPTY=",
        "MAX_KEY=3",
    ]
    found = Environment.parse(env, not_secret=["MAX_KEY"], secret=["A=projects/p/secrets/s/versions/latest", "B=s/key"])
    assert found.variables["EMPTY"] == "" and found.variables["MAX_KEY"] == "3" and len(found.variables) == 5
    assert found.secrets["A"] == "projects/p/secrets/s/versions/latest"


def test_jobs_json_keeps_variables_and_names_of_secrets_and_old_ones_are_read():
    work = Work("w", "gs://bucket/w", (), environment={"A": "ü $(x)"}, secrets=("HF_TOKEN",))
    assert Work.from_json(work.to_json()) == work
    old = {k: v for k, v in json.loads(work.to_json()).items() if k not in ("environment", "secrets")} | {"version": 1}
    assert Work.from_json(json.dumps(old)) == Work("w", "gs://bucket/w", ())
    with pytest.raises(ConfigError, match="newer"):
        Work.from_json(json.dumps({**old, "version": 99}))


def test_several_lines_and_short_values():
    redact = environment.redactor(["PEM", "PIN"], {"PEM": "-----BEGIN\nabcdefghijkl\nx\n", "PIN": "1234"})
    assert redact(b"abcdefghijkl 1234 x\n") == b"[secret PEM] 1234 x\n"


def test_jobs_get_them_and_no_log_shows_a_secret(tmp_path):
    code = (
        "import os, sys\nprint(os.environ['A'], os.environ['LIBTPU_INIT_ARGS'], os.environ['HF_TOKEN'], flush=True)\n"
        "import json\n"
        "status = {'reason': 'diverged', 'exit_code': 5, 'step': 1, 'finding': 'x ' + os.environ['HF_TOKEN']}\n"
        "open(os.environ['PEREX_T5X_STATUS_FILE'], 'w').write(json.dumps(status)); sys.exit(5)"
    )
    job = Job("a", ("-c", code), str(tmp_path / "out" / "a"))
    variables = {"A": "one", LIBTPU: "--b=1"}
    work = Work("w", str(tmp_path / "out"), (job,), {"name": "w"}, environment=variables, secrets=("HF_TOKEN",))
    (tmp_path / "jobs.json").write_text(work.to_json())
    command = [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / 'jobs.json'}"]
    env = {**os.environ, worker.HOST_INDEX: "0", "HF_TOKEN": "hf_value-of-it", LIBTPU: "--a=1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 3, done.stdout
    assert "one --a=1 --b=1 [secret HF_TOKEN]" in done.stdout
    texts = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file() and p.name != "a.status.json"}
    assert {"a.log", "log.txt", "finished.json"} <= {p.name for p in texts}
    assert not [p for p, text in texts.items() if "hf_value-of-it" in text] and "hf_value-of-it" not in done.stdout
    del env["HF_TOKEN"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 2 and "--secret HF_TOKEN is not in the environment" in done.stdout
