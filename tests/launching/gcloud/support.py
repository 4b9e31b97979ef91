"""A cloud of stand-ins: see standins/gcloud."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STANDINS = Path(__file__).parent.parent / "standins"
ROOT = Path(__file__).parents[3]


class Cloud:
    def __init__(self, folder, **scenario):
        self.folder = folder
        self.root = folder / "bucket" / "my-bucket" / "x"  # gs://my-bucket/x
        (folder / "scenario.json").write_text(json.dumps(scenario))
        self.environment = {
            **os.environ,
            "PATH": f"{STANDINS}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "STANDIN_DIR": str(folder),
            "STANDIN_PYTHON": sys.executable,
            "PEREX_T5X_LAUNCH_DIR": str(folder / "prepared"),
            "PEREX_T5X_RETRY_SECONDS": "0.05",
            "PEREX_T5X_POLL_SECONDS": "0.3",
            "CLOUDSDK_CONFIG": str(folder / "no-config"),
        }

    def job(self, name, code, *more):
        """A job that notes that it runs, on which host, and then does `code`; `here` is its folder in the bucket."""
        here = self.root / "runs" / name
        begin = f"import os, sys, time\nhere = {str(here)!r}\nos.makedirs(here, exist_ok=True)\n"
        begin += f"cloud = {str(self.folder)!r}\nhost = os.environ['PEREX_T5X_HOST']\n"
        begin += f"print('hello of {name} on', host, flush=True)\n"
        begin += f"open(cloud + '/ran', 'a').write('{name}' + host + ' ')\n"
        # As real jobs do, it waits for the other host, however late that starts.
        begin += f"ran = lambda n: open(cloud + '/ran').read().split().count('{name}' + n)\n"
        begin += "end = time.monotonic() + 20\n"
        begin += "while ran('0') != ran('1') and time.monotonic() < end: time.sleep(0.05)\n"
        return {"name": name, "arguments": ["-c", begin + code, *more], "model_dir": str(here)}

    def work(self, *jobs, **more):
        (self.folder / "work.json").write_text(json.dumps({"root": "gs://my-bucket/x", "jobs": jobs, **more}))

    def popen(self, *argv, environment=None):
        return subprocess.Popen(
            [sys.executable, *argv], env=environment or self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=self.folder)  # fmt: skip

    def start(self, **options):
        return self.popen(str(STANDINS / "driver.py"), json.dumps(options))

    def launch(self, **options):
        return finished(self.start(**options))

    def detach(self, **options):
        """Launches what goes on without the launcher; returns once that has ended."""
        return self.launch(detach=True, **options)

    @property
    def detached(self):
        """detached.json, once there is one."""
        path = self.root / ".launch/run/detached.json"
        return json.loads(path.read_text()) if path.exists() else None

    def elsewhere(self, *argv):
        """A command on another machine, which knows neither project nor zone."""
        environment = {**self.environment, "STANDIN_NO_CONFIG": "1"}
        return finished(self.popen(str(ROOT / "launch" / "gcloud_tpu.py"), *argv, environment=environment))

    def command(self, *argv):
        where = ("--project=my-project", "--zone=us-west4-a")
        return finished(self.popen(str(ROOT / "launch" / "gcloud_tpu.py"), *argv, *where))

    @property
    def commands(self):
        """All commands given to gcloud from this machine, in order; those of the hosts left out."""
        return self._recorded("record.jsonl")

    @property
    def host_commands(self):
        """Those given to gcloud by hosts."""
        return self._recorded("hosts.jsonl")

    def _recorded(self, name):
        path = self.folder / name
        return [json.loads(line) for line in open(path)] if path.exists() else []

    @property
    def verbs(self):
        """What they do, repetitions of the same left out."""
        found = []
        for argv in self.commands:
            verb = next(w for w in reversed(argv[:6]) if w in VERBS)
            if not found or found[-1] != verb:
                found.append(verb)
        return found

    @property
    def resources(self):
        try:
            return json.load(open(self.folder / "state.json"))["resources"]
        except FileNotFoundError:
            return {}

    @property
    def ran(self):
        path = self.folder / "ran"
        return path.read_text().split() if path.exists() else []

    def wait_for(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.05)


VERBS = ("create", "describe", "delete", "list", "ssh", "cp", "cat", "rm", "ls", "rsync", "get-value")


def scenario(cloud, **values):
    """How the stand-in behaves from now on."""
    (cloud.folder / "scenario.json").write_text(json.dumps(values))


def there(cloud, **more):
    """A resource that an earlier launch has created, and nothing else."""
    (cloud.folder / "state.json").write_text(json.dumps({"resources": {"run": created(**more)}, "counts": {}}))


def created(**more):
    """What the stand-in keeps of a resource."""
    from perex_t5x.launching.names import fingerprint

    labels = {"perex-name": "run", "perex-run": fingerprint("gs://my-bucket/x")}
    return {"states": ["ACTIVE"], "labels": labels, "nodes": ["run"], "type": "v5litepod-16", **more}


def processes(folder):
    """The processes of a cloud, on its hosts or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"STANDIN_DIR={folder}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def killed_workers(folder):
    """Ends what a test that failed may leave behind."""
    for _ in range(3):  # machines start others
        for pid in processes(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class Finished:
    def __init__(self, process, out, err):
        self.status, self.out, self.err = process.returncode, out, err
        self.last = err.strip().splitlines()[-1] if err.strip() else ""
        assert "Traceback" not in err, err


def finished(process, interrupt=None, timeout=120):
    if interrupt is not None:
        process.send_signal(interrupt)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    return Finished(process, out, err)
