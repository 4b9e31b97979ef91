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
import shlex
from dataclasses import dataclass

from perex_t5x.launching import bundle

_PYTHONS = "python3.13 python3.12 python3.11"
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
# The worker, or the shell around it, which writes its exit code.
_IS_RUNNING = '[ -e starter.pid ] && kill -0 "$(cat starter.pid)" 2>/dev/null && [ ! -e exit_status ]'
_INSTALLED = '[ "$(cat installed 2>/dev/null || true)" = "$sum" ]'  # and not what was copied before


def _folder(name: str) -> str:
    return f'"$HOME"/perex/{shlex.quote(name)}'


def _script(*pieces: str) -> str:
    return "; ".join(pieces)


def _before(step: str) -> str:
    return f"{{ echo 'this comes after: launch/gcloud_tpu.py {step}' >&2; exit 1; }}"


def copy(name: str, url: str) -> str:
    """Fetches the bundle from the bucket: 64 hosts read it at once, where one sender would serve them in turn."""
    return _script(
        "set -eu",
        f"mkdir -p {_folder(name)}",
        f"cd {_folder(name)}",
        f"gcloud storage cp {shlex.quote(url)} bundle.tar.gz.new",
        "rm -rf gin_files packages ./*.whl",
        "mv bundle.tar.gz.new bundle.tar.gz",
        "tar -xzf bundle.tar.gz",
    )


def install(name: str, python: str | None = None) -> str:
    """Makes the virtual environment. The images of TPU VMs have Python 3.10; 3.11 comes from Ubuntu's own archive."""
    apt = "sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -yq"
    find = f"for p in {shlex.quote(python) if python else _PYTHONS}; do command -v $p && break; done"
    if python:
        missing = f"echo {shlex.quote(f'there is no {python} on this host')} >&2; exit 1"
    else:
        missing = f"{apt} update || true; {apt} install python3.11 python3.11-venv; py=$(command -v python3.11)"
    wheel = shlex.quote(f"./{bundle.WHEEL}[tpu]")
    return _script(
        "set -eu",
        f"cd {_folder(name)} 2>/dev/null || {_before('copy')}",
        # A connection that broke may have left an install running.
        "exec 9> install.lock",
        "flock 9",
        _SUM,
        f"if {_INSTALLED}; then exit 0; fi",
        f"py=$({find}) || true",
        f'if [ -z "$py" ]; then {missing}; fi',
        # One that was interrupted has a Python and no pip.
        'venv/bin/python -m pip --version > /dev/null 2>&1 || { rm -rf venv; "$py" -m venv venv; }',
        "more=$(ls packages/*.whl 2>/dev/null || true)",
        f"venv/bin/python -m pip install --quiet --constraint=constraints.txt {wheel} $more",
        # The same version, maybe from another commit.
        f"venv/bin/python -m pip install --quiet --force-reinstall --no-deps ./{bundle.WHEEL} $more",
        'echo "$sum" > installed',
    )


def start(name: str) -> str:
    """Starts the worker so that it outlives the connection; where one is running, nothing happens."""
    run = "venv/bin/python -m perex_t5x.launching.worker --jobs=jobs.json; echo $? > exit_status.new; "
    run += "mv exit_status.new exit_status"
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
        # No `;` after `&`: the pieces are joined by it.
        f"{{ setsid nohup bash -c {shlex.quote(run)} >> worker.log 2>&1 < /dev/null 9>&- & }}",
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
