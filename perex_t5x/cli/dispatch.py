"""One name for all commands: `perex train ...` is `python -m perex_t5x.train ...`, with the same flags and exit codes.

    perex                      lists the commands
    perex train --help         one command's flags
    perex completion bash      prints a completion script; also zsh, fish

Nothing but Python's own library is imported before the command is known. Where the package stands in a checkout, the
launchers of its `launch/` folder are commands, too.
"""

from __future__ import annotations

import os
import platform
import runpy
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from perex_t5x import __version__, cli
from perex_t5x.errors import ConfigError, Reason, did_you_mean


@dataclass(frozen=True)
class Command:
    """What is run by a name.

    Attributes:
      place: a module below `perex_t5x`, or a file in `launch/`.
      summary: what it does, in a line.
      is_argparse: whether it reads its flags with argparse, not absl.
    """

    place: str
    summary: str
    is_argparse: bool = False

    @property
    def is_script(self) -> bool:
        return self.place.endswith(".py")


COMMANDS = {
    "quickstart": Command("quickstart", "trains a small language model and says what to look at next"),
    "train": Command("train", "trains; the same command again resumes"),
    "eval": Command("eval", "evaluates a checkpoint with SeqIO's evaluator"),
    "infer": Command("infer", "predicts or scores a task's examples as JSON lines"),
    "checkpoints": Command("checkpoints", "verifies, inspects and converts checkpoints"),
    "gin_port": Command("gin_port", "rewrites T5X's Gin files"),
    "main": Command("main", "train, eval and infer under T5X's command, --run_mode=train"),
    "sweep": Command("experiments.sweep", "many runs from one description"),
    "study": Command("experiments.study", "one of the paper's studies: runs, findings, page"),
    "report": Command("experiments.report", "one HTML page of sweeps and runs, and figures"),
    "preflight": Command("preflight", "compiles the step for a TPU slice, without one: does it fit, what does it cost"),
    "collectives": Command("preflight.collectives", "lists every collective of that step"),
    "overhead": Command("preflight.overhead", "compiled cycles of the statistics beside the plain gradient"),
    "throughput": Command("preflight.throughput", "cycles, MFU and memory of whole steps on pods"),
    "breakdown": Command("preflight.breakdown", "where the cycles of any compiled program go"),
    "bench": Command("bench", "wall-clock time of the trainer and of the engine beside their baselines"),
    "chaos": Command("chaos", "kills and damages runs, resumes them, and compares"),
    "local": Command("launching.local", "several real processes on this machine", is_argparse=True),
    "gcloud_tpu": Command("gcloud_tpu.py", "a run or a sweep on TPU VMs (from a checkout)"),
    "gke": Command("gke.py", "the same on a Kubernetes cluster with TPUs (from a checkout)"),
    "completion": Command("cli.completion", "prints a completion script: perex completion bash|zsh|fish"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: perex COMMAND [flags]",
            "",
            *lines,
            "",
            "perex COMMAND --help lists a command's flags; perex --version.",
        ]
    )


def version() -> str:
    """This package's, and those of what every number depends on; nothing of it is imported."""
    found = [f"perex_t5x {__version__}", f"python {platform.python_version()}"]
    for name in ("jax", "optax"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def find(name: str) -> Command:
    """The command of a name; also by its module, as `python -m perex_t5x.NAME` has it.

    >>> find("sweep") is find("experiments.sweep")
    True
    >>> find("trian")
    Traceback (most recent call last):
    perex_t5x.errors.ConfigError: 'trian' is not a command. Did you mean 'train'? perex --help lists them.
    """
    known = COMMANDS | {command.place: command for command in COMMANDS.values()}
    if name not in known:
        raise ConfigError(f"{name!r} is not a command.{did_you_mean(name, known)} perex --help lists them.")
    return known[name]


def run(command: Command, words: list[str]) -> None:
    """Runs a command in this process as Python itself would, `python -m` or `python FILE`."""
    sys.argv[1:] = words
    if not command.is_script:
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()  # rather than the folder of this script: Gin files may import what is here
        runpy.run_module(f"perex_t5x.{command.place}", run_name="__main__", alter_sys=True)
        return
    script = Path(__file__).parents[2] / "launch" / command.place
    if not script.is_file():
        raise ConfigError(
            f"perex {script.stem} sends the checkout that it runs from, and this perex_t5x is not in one: clone the "
            f"repository and run its launch/{script.name}, or install it with pip install -e."
        )
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    """The command `perex`. Ends with the command's exit code."""
    try:
        _main(*(sys.argv[1:] or ["help"]))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has what it wants; commands end by themselves
        if cli.output_is_read():
            raise
        sys.exit(Reason.INTERRUPTED.exit_code)


def _main(name: str, *words: str) -> None:
    if name in ("help", "--help", "-h", "-help"):
        print(usage())
    elif name in ("--version", "version"):
        print(version())
    else:
        try:
            command = find(name)
            run(command, list(words))
        except ConfigError as e:  # commands print their own errors
            print(f"ERROR: {e}", file=sys.stderr)
            sys.exit(e.reason.exit_code)
