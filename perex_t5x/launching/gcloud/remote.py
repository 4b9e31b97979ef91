"""Scripts for the hosts of a slice. Each can be run again, and then finds what is done already.

    ~/perex/NAME/bundle.tar.gz    what was copied: wheel, constraints.txt, jobs.json, Gin files, unpacked beside it
    ~/perex/NAME/venv             Python with the wheel
    ~/perex/NAME/worker.log       what `launching.worker` and the jobs print
    ~/perex/NAME/exit_status      how the worker has ended

What crosses the shells is quoted by `shlex`; names are checked besides.
"""

from __future__ import annotations

import shlex

from perex_t5x.launching import bundle

EXIT = "perex-exit"  # begins the last line of `follow`
_PYTHONS = "python3.13 python3.12 python3.11"
LOST = "lost"


_SUM = "sum=$(sha256sum bundle.tar.gz | cut -d' ' -f1)"
_INSTALLED = '[ "$(cat installed 2>/dev/null || true)" = "$sum" ]'  # and not what was copied before


def _folder(name: str) -> str:
    return f'"$HOME"/perex/{shlex.quote(name)}'


def _before(step: str) -> str:
    return f"{{ echo 'this comes after: launch/gcloud_tpu.py {step}' >&2; exit 1; }}"


def copy(name: str, url: str) -> str:
    """Fetches the bundle from the bucket: 64 hosts read it at once, where one sender would serve them in turn."""
    return "; ".join(
        [
            "set -eu",
            f"mkdir -p {_folder(name)}",
            f"cd {_folder(name)}",
            f"gcloud storage cp {shlex.quote(url)} bundle.tar.gz.new",
            "rm -rf gin_files packages ./*.whl",
            "mv bundle.tar.gz.new bundle.tar.gz",
            "tar -xzf bundle.tar.gz",
        ]
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
    return "; ".join(
        [
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
        ]
    )


def start(name: str) -> str:
    """Starts the worker so that it outlives the connection; where one is running, nothing happens."""
    run = "venv/bin/python -m perex_t5x.launching.worker --jobs=jobs.json; echo $? > exit_status.new; "
    run += "mv exit_status.new exit_status"
    return "; ".join(
        [
            "set -eu",
            f"cd {_folder(name)} 2>/dev/null || {_before('copy')}",
            _SUM,
            f"{_INSTALLED} || {_before('install')}",
            "exec 9> start.lock",
            "flock 9",
            f"if {_RUNNING}; then echo running already; exit 0; fi",
            "rm -f exit_status",
            "touch worker.log",
            # No `;` after `&`: the pieces are joined by it.
            f"{{ setsid nohup bash -c {shlex.quote(run)} >> worker.log 2>&1 < /dev/null 9>&- & }}",
            "echo $! > starter.pid",
            "echo started",
        ]
    )


# The worker, or the shell around it, which notes how it has ended.
_RUNNING = '[ -e starter.pid ] && kill -0 "$(cat starter.pid)" 2>/dev/null && [ ! -e exit_status ]'


def follow(name: str, skip: int = 0) -> str:
    """Prints worker.log from its byte `skip` on until the worker has ended, then a line with its exit status."""
    wait = f"while {_RUNNING} && kill -0 $tail 2>/dev/null; do sleep ${{PEREX_T5X_POLL:-5}}; done; sleep 1"
    return "; ".join(
        [
            f"cd {_folder(name)} && [ -e starter.pid ] || {{ echo {EXIT} unstarted; exit 0; }}",
            f"{{ tail -c +{skip + 1} -F worker.log 2>/dev/null & }}",
            "tail=$!",
            "trap 'kill $tail 2>/dev/null' EXIT HUP TERM",
            wait,
            f"if {_RUNNING}; then exit 1; fi",  # nobody reads any more
            "kill $tail 2>/dev/null",
            "wait $tail 2>/dev/null",
            f'printf "\\n%s %s\\n" {EXIT} "$(cat exit_status 2>/dev/null || echo {LOST})"',
        ]
    )


def status(name: str) -> str:
    """One line: which host, what its worker does, and the last line of its log. gcloud mixes the lines of all hosts."""
    state = f'if {_RUNNING}; then s=running; elif [ -e exit_status ]; then s="ended with $(cat exit_status)"; '
    state += "elif [ -e starter.pid ]; then s=lost; else s='not started'; fi"
    last = "$(tail -n 1 worker.log 2>/dev/null || true)"
    host = "h=${HOSTNAME:-$(hostname)}"
    return f'{host}; cd {_folder(name)} 2>/dev/null || {{ echo "$h nothing here"; exit 0; }}; {state}; echo "$h $s: {last}"'


def stop(name: str, patience: int = 120) -> str:
    """Asks the worker to save and stop, and waits until it has; one that does not is killed, and its job with it."""
    wait = f"for i in $(seq {patience}); do if {_RUNNING}; then sleep 1; fi; done"
    return "; ".join(
        [
            f"cd {_folder(name)} || exit 0",
            f"if ! {{ {_RUNNING}; }}; then echo not running; exit 0; fi",
            'kill -TERM "$(cat worker.lock)" 2>/dev/null || true',
            wait,
            f'if {_RUNNING}; then kill -KILL "$(cat worker.lock)" 2>/dev/null || true; sleep 3; fi',
            f"if {_RUNNING}; then echo does not stop >&2; exit 1; fi",
            "echo stopped",
        ]
    )
