"""The flags that all launchers share, read once into a `Request`, or into `LaunchFlags`."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from absl import flags

from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, names, spec
from perex_t5x.launching.environment import Environment, define_environment_flags
from perex_t5x.launching.shell import Commands


def define_launch_flags() -> None:
    """Defines the launchers' flags, on top of those of `perex_t5x.train` and of sweeps."""
    cli_flags.define_training_flags()
    cli_flags.define_sweep_flags()
    flags.DEFINE_string("name", None, "Of the launch; default: the sweep's name, or the last part of MODEL_DIR.")
    flags.DEFINE_string("module", "perex_t5x.train", "The command of a single run: perex_t5x.train, .eval or .infer.")
    flags.DEFINE_string("topology", None, "TPU slice: v5e:16x16, v5e-256; default: TOPOLOGY of the mesh's Gin file.")
    flags.DEFINE_integer("slices", None, "Number of slices; default: NUM_SLICES of the Gin files, or 1.")
    flags.DEFINE_string("accelerator_type", None, "gcloud's name of the slice, if it is not the usual one.")
    flags.DEFINE_string("runtime_version", None, "The TPU VM's image, if it is not the usual one.")
    flags.DEFINE_string("project", None, "Cloud project; default: from gcloud's configuration.")
    flags.DEFINE_string("zone", None, "Zone of the slices; default: from gcloud's configuration.")
    flags.DEFINE_bool("spot", False, "Cheaper slices that may be preempted; the run then resumes on new ones.")
    flags.DEFINE_string("reservation", None, "Use slices of this reservation.")
    flags.DEFINE_bool("skip_preflight", False, "Do not compile the step for the slices first.")
    flags.DEFINE_bool("skip_gin_check", False, "Do not build the configurations here: data that only hosts can read.")
    flags.DEFINE_bool("yes", False, "Do not ask for confirmation.")
    flags.DEFINE_bool("keep", False, "Delete nothing at the end or after a failure; name what is left.")
    flags.DEFINE_float("price_per_chip_hour", None, "In USD, instead of the list price.")
    flags.DEFINE_bool("allow_uncommitted", False, "Include uncommitted files as they are.")
    flags.DEFINE_integer("max_restarts", 10, "How often an interrupted run is restarted.")
    flags.DEFINE_list("with_package", [], "More wheels or project folders to install, such as your own tasks.")
    define_environment_flags()


# Flags that `LaunchFlags` has under the same names; `project` and `zone` are "" if they are not given.
_AS_FLAGS = (
    *("spot", "reservation", "skip_preflight", "skip_gin_check", "yes", "keep"),
    *("allow_uncommitted", "max_restarts", "dry_run"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """What a command was asked about a launch: enough for those that only inspect or stop one, which its name finds.

    Attributes:
      name: checked; part of the names of everything that is created.
      slice: the kind of slice; None if no flag names one.
      slices: their number.
      project, zone: "" until they are known, see `located`.
      environment: name -> value, of the jobs' environment variables; also in a request's `work`, from which the worker
        sets them.
      secrets: name -> reference, of those whose values the launcher has to put into the worker's environment.
      others: as the flags of these names.
    """

    name: str
    slice: Slice | None
    slices: int
    project: str
    zone: str
    spot: bool
    reservation: str | None
    skip_preflight: bool
    yes: bool
    keep: bool
    allow_uncommitted: bool
    max_restarts: int
    with_package: tuple[str, ...]
    dry_run: bool
    skip_gin_check: bool = False
    reserved: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_flags(cls, args: Any) -> LaunchFlags:
        """Reads the flags; raises `ConfigError` for the first problem."""
        _check(args)
        if args.name is None:
            raise ConfigError("--name is missing: the name of the launch.")
        given = _given(args)
        slices = _checked_slices(1 if args.slices is None else args.slices)
        kind = _slice(args, args.topology) if args.topology else None
        return cls(name=args.name, slice=kind, slices=slices, **given)

    def located(self, commands: Commands) -> Self:
        """The same with project and zone, from gcloud's configuration if they are not given."""
        located = {}
        for name, key, check in (
            ("project", "project", names.check_project),
            ("zone", "compute/zone", names.check_zone),
        ):
            value = getattr(self, name)
            if not value and commands.dry_run:
                raise ConfigError(f"--{name} is missing: a dry run does not read gcloud's configuration.")
            if not value:
                value = commands.read(["gcloud", "config", "get-value", key], check=False)
            if not value or value == "(unset)":
                raise ConfigError(f"--{name} is missing, and gcloud's configuration has none.")
            located[name] = check(value)
        return dataclasses.replace(self, **located)


@dataclass(frozen=True, kw_only=True)
class Request(LaunchFlags):
    """What a launch was asked to do: its flags, and what runs.

    Attributes:
      work: what runs.
      slice: on what, from the flags or the Gin files.
    """

    work: spec.Work
    slice: Slice

    @classmethod
    def from_flags(cls, args: Any) -> Request:
        """Reads the flags and the Gin files; raises `ConfigError` for the first problem."""
        _check(args)
        given = _given(args)
        work = spec.make(args)
        name = args.name or names.check_name(names.suggestion(work.name) or work.name)
        launch_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
        work = dataclasses.replace(work, environment=given["environment"], secrets=tuple(given["secrets"]))
        work = dataclasses.replace(work, launch=name, launch_id=launch_id)
        topology = args.topology or work.topology
        if not topology:
            raise ConfigError(
                "--topology is missing, such as --topology=v5e:16x16; or add a mesh's Gin file such as meshes/v5e_256.gin."
            )
        slices = _checked_slices(work.slices if args.slices is None else args.slices)
        return cls(name=name, work=work, slice=_slice(args, topology), slices=slices, **given)

    def in_bucket(self) -> Request:
        """The same; raises `ConfigError` unless everything is written to a bucket, as hosts of a slice must."""
        self.work.check_in_bucket()
        return self


def _check(args: Any) -> None:
    """Raises `ConfigError` for what no launch could be asked."""
    if args.spot and args.reservation:
        raise ConfigError("--spot and --reservation exclude each other.")
    if args.max_restarts < 0:
        raise ConfigError(f"--max_restarts={args.max_restarts}: must not be negative.")
    for check, value in ((names.check_project, args.project), (names.check_zone, args.zone)):
        if value is not None:
            check(value)
    if args.reservation:
        names.check_name(args.reservation.rpartition("/")[2], "--reservation")
    if args.name is not None:
        names.check_name(args.name)


def _given(args: Any) -> dict[str, Any]:
    """The attributes of `LaunchFlags` that come from the flags alone."""
    bundle.check_packages(args.with_package)
    given = Environment.parse(args.env, args.libtpu_args, args.secret, args.not_secret)
    return {
        "project": args.project or "",
        "zone": args.zone or "",
        "with_package": tuple(args.with_package),
        "reserved": getattr(args, "reserved", False),  # TPU VMs alone
        "environment": given.variables,
        "secrets": given.secrets,
        **{name: getattr(args, name) for name in _AS_FLAGS},
    }


def _checked_slices(slices: int) -> int:
    if slices < 1:
        raise ConfigError(f"--slices={slices}: must be at least 1.")
    return slices


def _slice(args: Any, topology: str) -> Slice:
    return Slice.of(topology, args.accelerator_type, args.runtime_version, args.price_per_chip_hour)
