"""What runs: the runs of a sweep, or one command, as a list of jobs that `launching.worker` reads from jobs.json."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gin import config_parser

from perex_t5x import gin_utils
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.files import is_remote
from perex_t5x.launching import names

GIN_FOLDER = "gin_files"  # beside jobs.json; a Gin search path of the jobs, which run in the folder of jobs.json
# Ends of a worker that a restart would repeat. Every other end, such as a lost connection to process 0, is restarted.
FINAL_REASONS = tuple(reason for reason in Reason if reason.final)
_VERSION = 2  # of jobs.json
# The Gin macros that say where a command writes.
_FOLDERS = ("MODEL_DIR", "EVAL_OUTPUT_DIR", "INFER_OUTPUT_DIR")
# Flags that are passed on to the jobs if they are given.
_TIMEOUTS = ("initialization_timeout", "heartbeat_timeout", "phase_timeout")
_PASSED_ON = ("cluster_detection", *_TIMEOUTS, "profile_steps", "dump_hlo")


@dataclass(frozen=True)
class Job:
    """One command that the worker runs: a run of a sweep, or a single run.

    Attributes:
      name: of the run.
      arguments: after `python`: ('-m', 'perex_t5x.train', '--gin_file=...', ...).
      model_dir: where it writes; gs://... or an absolute path.
      batch_size, train_steps: of a training; 0 for others.
      group: the same for jobs that differ only in learning rate and seed.

    >>> Job("a", ("-m", "perex_t5x.train"), "gs://bucket/a").argv("python3")
    ['python3', '-m', 'perex_t5x.train']
    """

    name: str
    arguments: tuple[str, ...]
    model_dir: str
    batch_size: int = 0
    train_steps: int = 0
    group: str = ""

    def argv(self, python: str | None = None) -> list[str]:
        return [python or sys.executable, *self.arguments]

    @property
    def module(self) -> str:
        return self.arguments[1] if self.arguments[:1] == ("-m",) else ""

    @property
    def gin_arguments(self) -> list[str]:
        """The arguments with Gin files, bindings and search paths."""
        return [a for a in self.arguments if a.startswith(("--gin_file=", "--gin_bindings=", "--gin_search_paths="))]


@dataclass(frozen=True)
class Work:
    """Everything that a launch runs.

    Attributes:
      name: of the sweep or its folder; not checked.
      root: the folder of the sweep or the run.
      jobs: in order.
      sweep: the content of sweep.json; None for a single run.
      twins: name of a run -> the job with the same configuration, which runs for both.
      gin_files: name in `GIN_FOLDER` -> path on this machine, of Gin files that are not shipped with the package.
      topology, slices: from the Gin files, if they set them.
      environment: variables of every job, on top of the host's.
      launch: the name of the launch; its folder is ROOT/.launch/LAUNCH. "": none, as in tests and older versions.
      launch_id: another for every launch; the same for all restarts of one.
      secrets: names of variables, set on the hosts, whose values must not be printed or stored.
    """

    name: str
    root: str
    jobs: tuple[Job, ...]
    sweep: Mapping[str, Any] | None = None
    twins: Mapping[str, str] = field(default_factory=dict)
    gin_files: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None
    slices: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    launch: str = ""
    launch_id: str = ""

    @property
    def fingerprint(self) -> str:
        """The same for launches that write into the same folder."""
        return names.fingerprint(self.root.rstrip("/"))

    def check_in_bucket(self) -> None:
        """Raises `ConfigError` unless everything is written to a bucket."""
        for path in dict.fromkeys([self.root, *(job.model_dir for job in self.jobs)]):
            names.check_bucket_path(path, "--dir" if self.sweep else "--gin.MODEL_DIR")

    def to_json(self, indent: int | None = 1) -> str:
        """jobs.json; without `indent` on one line."""
        jobs = [dataclasses.asdict(job) for job in self.jobs]
        content = {"version": _VERSION, "name": self.name, "root": self.root, "jobs": jobs}
        content |= {"sweep": self.sweep, "twins": dict(self.twins)}
        content |= {"environment": dict(self.environment), "secrets": list(self.secrets)}
        content |= {"launch": self.launch, "launch_id": self.launch_id}
        return json.dumps(content, indent=indent, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Reads jobs.json."""
        try:
            content = json.loads(text)
            if content.get("version", 1) > _VERSION:
                raise ValueError(f"version {content['version']}, of a newer perex_t5x than the one that reads it")
            jobs = [Job(**{**job, "arguments": tuple(job["arguments"])}) for job in content["jobs"]]
            work = cls(content["name"], content["root"], tuple(jobs), content["sweep"], content["twins"])
            # Version 1 has none of these.
            more = {name: content[name] for name in ("environment", "launch", "launch_id") if name in content}
            return dataclasses.replace(work, secrets=tuple(content.get("secrets", ())), **more)
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"jobs.json cannot be read: {type(e).__name__}: {e}. Launch again.") from e


def make(args: Any) -> Work:
    """The work that the flags describe, parsed and, as far as possible without devices, checked.

    Raises:
      ConfigError: lists what is wrong.
    """
    from perex_t5x.cli import gin_command
    from perex_t5x.experiments.sweep import command
    from perex_t5x.hardware.devices import use_cpu_backend

    use_cpu_backend()
    gin_command.load_training(args)
    if not args.sweep and not args.gin_file:
        raise ConfigError(
            "nothing to run: give --sweep=sweeps/sqrt_lr.gin, or the --gin_file flags of a run with --gin.MODEL_DIR=gs://..."
        )
    given = [f"--{name}={args[name].value}" for name in _PASSED_ON if args[name].present]
    flags = [*command.passed_on(args), *given]
    work = _sweep(args, flags) if args.sweep else _single(args, flags)
    for job in work.jobs:
        if any("\0" in a for a in job.arguments):
            raise ConfigError(f"bindings of {job.name} contain a zero byte, which no command line can.")
    return work


def _sweep(args: Any, flags: Sequence[str]) -> Work:
    from perex_t5x.experiments.sweep import Sweep, execute
    from perex_t5x.experiments.sweep.runs import absolute
    from perex_t5x.preflight.step import topology_macro

    if args.module != "perex_t5x.train":
        raise ConfigError(f"--module={args.module}: the runs of a sweep are always perex_t5x.train.")
    sweep = Sweep.load(args.sweep, args.sweep_bindings, args.gin_search_paths)
    if not args.dir:
        raise ConfigError(f"--dir is missing: the sweep's folder, such as --dir=gs://BUCKET/sweeps/{sweep.name}")
    # Not checked here, without devices: `checks` builds the configurations on as many fake devices as the slices have.
    plan = sweep.plan(args.gin_file, args.gin_bindings, args.gin_search_paths, check=False, flags=flags)
    root = absolute(args.dir.rstrip("/"))
    extra = ExtraGinFiles(args.gin_search_paths)
    jobs = []
    chosen = execute.chosen_runs(plan.runs, args.only)
    first_of = {name: first.name for name, first in execute.first_of_twins(chosen, {}).items()}
    for run in chosen:
        if first_of[run.name] != run.name:
            continue
        files = tuple(extra.add(name) for name in run.files)
        on_host = dataclasses.replace(run, files=files, search_paths=_search_paths(extra))
        arguments = tuple(on_host.command(root, "python")[1:])
        jobs.append(Job(run.name, arguments, run.folder(root), run.batch_size, run.train_steps, run.group))
    doubles = {name: first for name, first in first_of.items() if name != first}
    return Work(sweep.name, root, tuple(jobs), plan.described(), doubles, extra.paths, *topology_macro())


def read_single(args: Any, such_as: str) -> tuple[list[str], str, int, int]:
    """A single run's bindings, its folder (`such_as` is an example), its batch size and its steps; 0 if it is no training.

    Gin holds its configuration afterwards.
    """
    import gin

    from perex_t5x.experiments.sweep import scaling
    from perex_t5x.experiments.sweep.runs import absolute

    for name in ("sweep_bindings", "only", "print_commands"):
        if getattr(args, name, None):
            raise ConfigError(f"--{name} is only for sweeps: add --sweep.")
    bindings = [*args.gin_bindings, *([f"MODEL_DIR = {absolute(args.dir)!r}"] if args.dir else [])]
    gin.clear_config()
    gin_utils.parse_gin_flags(args.gin_search_paths, args.gin_file, bindings)
    folder = next((value for name in _FOLDERS if (value := _macro(name))), None)
    if not isinstance(folder, str):
        raise ConfigError(f"the Gin files set no MODEL_DIR: use those of a run, and set --gin.MODEL_DIR={such_as}.")
    if args.module != "perex_t5x.train":
        return bindings, folder, 0, 0
    base = scaling.read_settings()
    return bindings, folder, base.batch_size.value, base.train_steps


def arguments(
    module: str, search_paths: Sequence[str], files: Sequence[str], bindings: Sequence[str], flags: Sequence[str]
) -> list[str]:
    """The command of a single run, after `python`."""
    paths = [f"--gin_search_paths={','.join(search_paths)}"] if search_paths else []
    gin_files = [f"--gin_file={name}" for name in files]
    return ["-m", module, *paths, *gin_files, *(f"--gin_bindings={binding}" for binding in bindings), *flags]


def _single(args: Any, flags: Sequence[str]) -> Work:
    from perex_t5x.experiments.sweep.runs import absolute
    from perex_t5x.preflight.step import topology_macro

    bindings, folder, batch_size, train_steps = read_single(args, such_as="gs://BUCKET/FOLDER")
    extra = ExtraGinFiles(args.gin_search_paths)
    files = [extra.add(name) for name in args.gin_file]
    words = arguments(args.module, _search_paths(extra), files, bindings, flags)
    root = absolute(folder.rstrip("/"))
    if root != folder and not is_remote(folder) and folder == _macro("MODEL_DIR"):
        words.append(f"--gin_bindings=MODEL_DIR = {root!r}")
    name = root.rpartition("/")[2]
    job = Job(name, tuple(words), root, batch_size, train_steps)
    return Work(name, root, (job,), None, {}, extra.paths, *topology_macro())


def _search_paths(extra: ExtraGinFiles) -> tuple[str, ...]:
    return (GIN_FOLDER,) if extra.paths else ()


def _macro(name: str) -> Any:
    import gin

    try:
        return gin.query_parameter(f"%{name}")
    except ValueError:
        return None


@dataclass
class ExtraGinFiles:
    """Gin files that are not shipped with the package, and what they include; they are copied to the hosts.

    Attributes:
      search_paths: --gin_search_paths of this machine.
      paths: name in `GIN_FOLDER`, under which the jobs find a file -> its path on this machine.
    """

    search_paths: Sequence[str] = ()
    paths: dict[str, str] = field(default_factory=dict)

    def add(self, name: str) -> str:
        """Adds a --gin_file, if it is not shipped; returns its name on the hosts."""
        path = gin_utils.find_file(name, ["", *self.search_paths, gin_utils.shipped_gin_dir()], "--gin_file")
        beside = os.path.dirname(os.path.abspath(path))
        new_name = name
        if not _is_shipped(path):
            if os.path.isabs(name) or ".." in Path(name).parts:
                new_name = os.path.basename(name)  # the hosts do not have its folder
            new_name = os.path.normpath(new_name)
            self._take(new_name, path)
        elif os.path.isabs(name) or not os.path.isfile(os.path.join(gin_utils.shipped_gin_dir(), name)):
            # Given by its path on this machine: on the hosts it is found by its name among the shipped ones.
            new_name = os.path.relpath(os.path.realpath(path), os.path.realpath(gin_utils.shipped_gin_dir()))
        self._includes(path, ["", *self.search_paths, beside, gin_utils.shipped_gin_dir()])
        return new_name

    def _take(self, name: str, path: str) -> None:
        if os.path.realpath(self.paths.get(name, path)) != os.path.realpath(path):
            raise ConfigError(
                f"two Gin files would both be copied as {name}: {self.paths[name]} and {path}. Rename one of them."
            )
        self.paths[name] = path

    def _includes(self, path: str, search_paths: Sequence[str]) -> None:
        with open(path, encoding="utf-8") as f:
            statements = list(config_parser.ConfigParser(f, gin_utils.BindingNames()))
        for statement in statements:
            if not isinstance(statement, config_parser.IncludeStatement):
                continue
            name = statement.filename
            included = gin_utils.find_file(name, [os.path.dirname(path), *search_paths], path)
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise ConfigError(
                    f"{path}: include {name!r} will not be found on another machine. Include it by a name within "
                    "the working directory or a folder of --gin_search_paths."
                )
            if not _is_shipped(included):
                self._take(os.path.normpath(name), included)
            self._includes(included, search_paths)


def _is_shipped(path: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(gin_utils.shipped_gin_dir()))
