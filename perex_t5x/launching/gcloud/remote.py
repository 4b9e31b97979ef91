"""Scripts for the hosts of a slice. Each can be run again, and then finds what is done already.

    ~/perex/NAME/bundle.tar.gz    what was copied: wheel, constraints.txt, jobs.json, Gin files, unpacked beside it
    ~/perex/NAME/venv             Python with the wheel
    ~/perex/NAME/worker.log       what `launching.worker` and the jobs print
    ~/perex/NAME/exit_status      the worker's exit code

Whatever passes through a shell is quoted by `shlex`; names are checked besides. A host reports its state as one
line of JSON, see `HostStatus`.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perex_t5x.errors import ConfigError
from perex_t5x.launching import bundle
from perex_t5x.launching.launch_folder import ATTEMPT

_PYTHONS = "python3.13 python3.12 python3.11"
# Brings a released Python where a host has none: its wheel from the package index, Python itself from GitHub's releases of
# python-build-standalone, whose checksums uv knows.
_UV = "uv==0.13.8 --hash=sha256:e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984"  # x86-64
_PYTHON = "3.11.18"
ABSENT, UNSTARTED, RUNNING, ENDED, LOST = "absent", "unstarted", "running", "ended", "lost"
_KEY = "perex_host"


@dataclass(frozen=True)
class HostStatus:
    """What a host reports of its worker.

    Attributes:
      host: its name.
      state: ABSENT (nothing was copied to the host), UNSTARTED, RUNNING, ENDED, or LOST (the worker is gone and has left no
        exit code).
      exit_code: of a worker that has ended.
      last_line: of the worker's log.

    >>> HostStatus.parse('{"perex_host": "w-0", "state": "ended", "exit_code": 7, "log_base64": "c3RlcCA1"}')
    HostStatus(host='w-0', state='ended', exit_code=7, last_line='step 5')
    >>> HostStatus.parse("step 5") is None
    True
    """

    host: str
    state: str
    exit_code: int | None = None
    last_line: str = ""

    @classmethod
    def parse(cls, line: str) -> HostStatus | None:
        """From a line of `status` or `follow`; None for any other line."""
        if not line.startswith(f'{{"{_KEY}":'):
            return None
        try:
            report = json.loads(line)
            last_line = base64.b64decode(report["log_base64"]).decode(errors="replace").rstrip("\n")
            return cls(report[_KEY], report["state"], report["exit_code"], last_line)
        except (ValueError, KeyError):  # of a job that prints such a line itself
            return None

    def __str__(self) -> str:
        words = {ABSENT: "nothing here", UNSTARTED: "not started", ENDED: f"ended with {self.exit_code}"}
        return f"{self.host} {words.get(self.state, self.state)}{': ' if self.last_line else ''}{self.last_line}"


_SUM = "sum=$(sha256sum bundle.tar.gz | cut -d' ' -f1)"
_HAS_SUM = '[ "$(sha256sum bundle.tar.gz 2>/dev/null | cut -c 1-64)" = {} ]'
# The worker, or the shell around it, which writes its exit code.
_IS_RUNNING = '[ -e starter.pid ] && kill -0 "$(cat starter.pid)" 2>/dev/null && [ ! -e exit_status ]'
_INSTALLED = '[ "$(cat installed 2>/dev/null || true)" = "$sum" ]'  # and not what was copied before


def _folder(name: str) -> str:
    return f'"$HOME"/perex/{shlex.quote(name)}'


def _script(*pieces: str) -> str:
    return "; ".join(pieces)


def _before(step: str) -> str:
    return f"{{ echo 'this comes after: launch/gcloud_tpu.py {step}' >&2; exit 1; }}"


def copy(name: str, url: str, sha256: str) -> str:
    """Fetches the bundle from the bucket: 64 hosts read it at once, where one sender would serve them in turn. What has
    another checksum than the launcher's is not unpacked."""
    wrong = f"{url} has the sha256 $sum and not {sha256}: it was changed after the launch; launch again"
    return _script(
        "set -eu",
        f"mkdir -p {_folder(name)}",
        f"cd {_folder(name)}",
        f"if {_HAS_SUM.format(sha256)}; then exit 0; fi",
        f"gcloud storage cp {shlex.quote(url)} bundle.tar.gz.new",
        "sum=$(sha256sum bundle.tar.gz.new | cut -d' ' -f1)",
        f'if [ "$sum" != {sha256} ]; then rm -f bundle.tar.gz.new; echo "{wrong}" >&2; exit 1; fi',
        "rm -rf gin_files packages ./*.whl",
        "tar -xzf bundle.tar.gz.new",
        "mv bundle.tar.gz.new bundle.tar.gz",
    )


def install(name: str, python: str | None = None) -> str:
    """Makes the virtual environment.

    With the first released Python of 3.11 or newer: on the host, by uv, from the deadsnakes archive. The images of TPU VMs
    have 3.10, and Ubuntu 22.04's own 3.11 is a release candidate that crashes.
    """
    released = "import sys; v = sys.version_info; sys.exit(v < (3, 11) or v.releaselevel != 'final')"
    # released PYTHON: sets py if it is one.
    check = f'released() {{ p=$(command -v "${{1:-}}") && "$p" -c "{released}" 2>/dev/null && py=$p; }}'
    apt = "sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -yq"
    if python:
        wrong = f"--remote_python={python} is missing on this host, older than 3.11, or not a release"
        find = f"released {shlex.quote(python)} || {{ echo {shlex.quote(wrong)} >&2; exit 1; }}"
    else:
        wrong = (
            "no released Python of 3.11 or newer: this host has none, uv (package index, github.com) and the deadsnakes "
            "archive (ppa.launchpadcontent.net) cannot be reached. Give --remote_python, or the network a NAT"
        )
        find = _script(
            f"for p in {_PYTHONS}; do if released $p; then break; fi; done",
            f'[ -n "$py" ] || {{ {_uv()}; }} || echo "uv brought no Python" >&2',
            f'[ -n "$py" ] || {{ sudo add-apt-repository -y ppa:deadsnakes/ppa && {apt} install python3.11 python3.11-venv '
            "&& released python3.11; } || true",
            f'[ -n "$py" ] || {{ echo {shlex.quote(wrong)} >&2; exit 1; }}',
        )
    pip = "venv/bin/python -m pip install --quiet"
    *exact, own = (shlex.join(step) for step in bundle.PIP_STEPS)
    again = "--force-reinstall"  # the same version, maybe from another commit
    return _script(
        "set -eu",
        f"cd {_folder(name)} 2>/dev/null || {_before('copy')}",
        # A connection that broke may have left an install running.
        "exec 9> install.lock",
        "flock 9",
        _SUM,
        f"if {_INSTALLED}; then exit 0; fi",
        "py=",
        check,
        find,
        # One that was interrupted has a Python and no pip.
        'venv/bin/python -m pip --version > /dev/null 2>&1 || { rm -rf venv; "$py" -m venv venv; }',
        *(f"{pip} {step}" for step in exact),
        f"{pip} {again} {own}",
        "more=$(ls packages/*.whl 2>/dev/null || true)",
        f'if [ -n "$more" ]; then {pip} --constraint=constraints.txt $more; {pip} {again} --no-deps $more; fi',
        'echo "$sum" > installed',
    )


def _uv() -> str:
    """Joined by &&: it is one condition. The images' python3 (3.10) has pip."""
    get = "python3 -m pip install --quiet --no-deps --upgrade --target=uv --require-hashes -r uv.txt"
    bring = f'uv/bin/uv python install --no-bin --install-dir="$HOME"/perex/python {_PYTHON}'
    where = f'"$HOME"/perex/python/cpython-{_PYTHON}-*/bin/python3.11'
    return f"echo {shlex.quote(_UV)} > uv.txt && {get} && {bring} && released $(ls {where} | tail -n 1)"


@dataclass(frozen=True)
class Secret:
    """A secret of Secret Manager.

    >>> Secret.parse("HF_TOKEN", "hf-token:3", "p")
    Secret(variable='HF_TOKEN', secret='hf-token', version='3', project='p')
    >>> Secret.parse("A", "projects/q/secrets/a/versions/latest", "p").project
    'q'
    """

    variable: str
    secret: str
    version: str
    project: str

    @classmethod
    def parse(cls, variable: str, reference: str, project: str) -> Secret:
        match = re.fullmatch(r"projects/([\w:.-]+)/secrets/([\w-]+)/versions/(\w+)", reference, re.ASCII)
        if match:
            return cls(variable, match[2], match[3], match[1])
        if match := re.fullmatch(r"([\w-]+)(?::(\w+))?", reference, re.ASCII):
            return cls(variable, match[1], match[2] or "latest", project)
        raise ConfigError(
            f"--secret {variable}={reference}: on TPU VMs a secret of Secret Manager: SECRET, SECRET:VERSION or "
            "projects/PROJECT/secrets/SECRET/versions/VERSION."
        )

    def command(self, verb: str) -> list[str]:
        where = [f"--secret={self.secret}", f"--project={self.project}"]
        return ["gcloud", "secrets", "versions", verb, self.version, *where]


def parse_secrets(secrets: Mapping[str, str], project: str) -> list[Secret]:
    return [Secret.parse(variable, reference, project) for variable, reference in secrets.items()]


# secret VARIABLE COMMAND...: its value goes into the environment of this shell and of what it starts, and nowhere else. A
# refusal (status 2) would only repeat itself, anything else (1) may not.
_SECRET = (
    'secret() { v=$1; shift; for i in 1 2 3; do if value=$("$@" 2> secret.err); then '
    'export "$v=$value"; value=; return; fi; '
    "if grep -qE 'PERMISSION_DENIED|NOT_FOUND|FAILED_PRECONDITION' secret.err; then break; fi; sleep $i; done; "
    'echo "ERROR: --secret $v cannot be read on this host, whose service account needs '
    'roles/secretmanager.secretAccessor:"; cat secret.err; '
    "if grep -qE 'PERMISSION_DENIED|NOT_FOUND|FAILED_PRECONDITION' secret.err; then exit 2; fi; exit 1; }"
)


def worker(secrets: Sequence[Secret] = ()) -> str:
    """Runs the worker in the launch's folder, and keeps its exit code. Only names of secrets are in this script."""
    fetch = [_SECRET, *(f"secret {s.variable} {shlex.join(s.command('access'))}" for s in secrets)] if secrets else []
    run = _script(*fetch, "exec venv/bin/python -m perex_t5x.launching.worker --jobs=jobs.json")
    return _script(f"( {run} )", "echo $? > exit_status.new", "mv exit_status.new exit_status")


def start(name: str, secrets: Sequence[Secret] = (), attempt: str = "") -> str:
    """Starts the worker so that it outlives the connection; where one is running, nothing happens.

    `attempt` is the same on all hosts of this start: their logs and errors are kept under it.
    """
    return _script(
        "set -eu",
        f"cd {_folder(name)} 2>/dev/null || {_before('copy')}",
        _SUM,
        f"{_INSTALLED} || {_before('install')}",
        "exec 9> start.lock",
        "flock 9",
        f"if {_IS_RUNNING}; then echo running already; exit 0; fi",
        "rm -f exit_status",
        "touch worker.log",
        *([f"export {ATTEMPT}={shlex.quote(attempt)}", f"echo ${ATTEMPT} > attempt"] if attempt else []),
        # No `;` after `&`: the pieces are joined by it.
        f"{{ setsid nohup bash -c {shlex.quote(worker(secrets))} >> worker.log 2>&1 < /dev/null 9>&- & }}",
        "echo $! > starter.pid",
        "echo started",
    )


# report STATE EXIT_CODE LOG: the line that `HostStatus` reads. Any bytes may be in the log, so it is sent in base64.
_REPORT = (
    f'report() {{ printf \'{{"{_KEY}": "%s", "state": "%s", "exit_code": %s, "log_base64": "%s"}}\\n\' '
    '"${HOSTNAME:-$(hostname)}" "$1" "$2" "$3"; }'
)
# An exit_status without a number is that of a full disk.
_REPORT_STATE = (
    f'if {_IS_RUNNING}; then report {RUNNING} null "$last"; '
    f'elif [ -e exit_status ]; then report {ENDED} "$(grep -xE "[0-9]+" exit_status || echo 1)" "$last"; '
    f'elif [ -e starter.pid ]; then report {LOST} null "$last"; else report {UNSTARTED} null "$last"; fi'
)


def follow(name: str, skip: int = 0) -> str:
    """Prints worker.log from its byte `skip` on until the worker has ended, then an empty line and the host's status."""
    wait = f"while {_IS_RUNNING} && kill -0 $tail 2>/dev/null; do sleep ${{PEREX_T5X_POLL:-5}}; done; sleep 1"
    return _script(
        _REPORT,
        f"cd {_folder(name)} && [ -e starter.pid ] || {{ report {UNSTARTED} null ''; exit 0; }}",
        f"{{ tail -c +{skip + 1} -F worker.log 2>/dev/null & }}",
        "tail=$!",
        "trap 'kill $tail 2>/dev/null' EXIT HUP TERM",
        wait,
        f"if {_IS_RUNNING}; then exit 1; fi",  # nobody reads any more
        "kill $tail 2>/dev/null",
        "wait $tail 2>/dev/null",
        "last=",
        "echo",
        _REPORT_STATE,
    )


def status(name: str) -> str:
    """Prints the host's status, with the last line of its log. gcloud mixes the lines of all hosts."""
    return _script(
        _REPORT,
        f"cd {_folder(name)} 2>/dev/null || {{ report {ABSENT} null ''; exit 0; }}",
        "last=$(tail -n 1 worker.log 2>/dev/null | tail -c 2000 | base64 -w 0)",
        _REPORT_STATE,
    )


def keep_logs(name: str, url: str) -> str:
    """Stores the end of worker.log in the launch's folder, where the worker stores its own; in about a minute."""
    who = "from perex_t5x.launching import launch_folder as f, worker; print(f.host_name(worker.host_index()))"
    launch_id = """$(sed -n 's/.*"launch_id": "\\([^"]*\\)".*/\\1/p' jobs.json 2>/dev/null | head -n 1)"""
    attempt = "$(cat attempt 2>/dev/null || echo host)"
    return _script(
        f"cd {_folder(name)} 2>/dev/null || exit 0",
        "[ -e worker.log ] || exit 0",
        f"host=$(timeout 60 venv/bin/python -c {shlex.quote(who)} 2>/dev/null) || host=${{HOSTNAME:-$(hostname)}}",
        "tail -c 10000000 worker.log > worker.log.end",
        f'timeout 60 gcloud storage cp worker.log.end {shlex.quote(url)}/logs/"{launch_id}.{attempt}/$host"/host.00000.log',
    )


def stop(name: str, patience: int = 120) -> str:
    """Asks the worker to save and stop, and waits until it has; one that does not is killed, and its job with it."""
    wait = f"for i in $(seq {patience}); do if {_IS_RUNNING}; then sleep 1; fi; done"
    return _script(
        f"cd {_folder(name)} || exit 0",
        f"if ! {{ {_IS_RUNNING}; }}; then echo not running; exit 0; fi",
        'kill -TERM "$(cat worker.lock)" 2>/dev/null || true',
        wait,
        f'if {_IS_RUNNING}; then kill -KILL "$(cat worker.lock)" 2>/dev/null || true; sleep 3; fi',
        f"if {_IS_RUNNING}; then echo does not stop >&2; exit 1; fi",
        "echo stopped",
    )
