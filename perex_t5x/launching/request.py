"""What a launch was asked for: the flags of all launchers, read once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from absl import flags

from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, names, spec
from perex_t5x.launching.shell import Commands


def define_launch_flags() -> None:
    """Defines the launchers' flags, on top of those of `perex_t5x.train` and of sweeps."""
    cli_flags.define_training_flags()
    cli_flags.define_sweep_flags()
    flags.DEFINE_string(
        "name", None, "Of the launch and what it creates; default: the sweep's, or MODEL_DIR's last part."
    )
    flags.DEFINE_string("module", "perex_t5x.train", "What a single run is: perex_t5x.train, .eval or .infer.")
    flags.DEFINE_string("topology", None, "TPU slice: v5e:16x16, v5e-256; default: TOPOLOGY of the mesh's Gin file.")
    flags.DEFINE_integer("slices", None, "How many slices; default: NUM_SLICES of the Gin files, or 1.")
    flags.DEFINE_string("accelerator_type", None, "gcloud's name of the slice, if it is not the usual one.")
    flags.DEFINE_string("runtime_version", None, "The TPU VM's image, if it is not the usual one.")
    flags.DEFINE_string("project", None, "Cloud project; default: that of gcloud's configuration.")
    flags.DEFINE_string("zone", None, "Zone of the slices; default: that of gcloud's configuration.")
    flags.DEFINE_bool(
        "spot", False, "Cheaper slices that can be taken away at any time; the run then goes on on new ones."
    )
    flags.DEFINE_string("reservation", None, "Take the slices from this reservation.")
    flags.DEFINE_bool("skip_preflight", False, "Do not compile the step for the slices first.")
    flags.DEFINE_bool(
        "skip_gin_check", False, "Do not build the runs here first: for data that only the hosts can read."
    )
    flags.DEFINE_bool("yes", False, "Do not ask.")
    flags.DEFINE_bool("keep", False, "Delete nothing at the end or after a failure; what is left is named.")
    flags.DEFINE_float("price_per_chip_hour", None, "In USD, in place of the list price.")
    flags.DEFINE_bool("allow_uncommitted", False, "Take files along as they are, though they are not committed.")
    flags.DEFINE_integer("max_restarts", 10, "How often a run that was interrupted is started again.")
    flags.DEFINE_list("with_package", [], "Further wheels or project folders to install, such as your own tasks.")


@dataclass(frozen=True)
class Request:
    """A launch.

    Attributes:
      name: checked; part of the names of everything that is created.
      work: what shall run; None for commands that only look or stop.
      slice: the kind of slice; None where no flag names one and there is no `work`.
      slices: how many.
      others: as the flags of these names say.
    """

    name: str
    work: spec.Work | None
    slice: Slice | None
    slices: int
    project: str | None
    zone: str | None
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

    @classmethod
    def from_flags(cls, args: Any, with_work: bool = True, needs_slice: bool = True) -> Request:
        """Reads the flags, and with `with_work` the Gin files; raises `ConfigError` for the first slip.

        `needs_slice=False`: a launch that also runs without TPUs, such as on this machine.
        """
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
        if not with_work and args.name is None:
            raise ConfigError("which launch? Give its --name=...")
        bundle.check_packages(args.with_package)
        work = spec.make(args) if with_work else None
        topology = args.topology or (work and work.topology)
        if with_work and needs_slice and not topology:
            raise ConfigError(
                "on which slice? Give --topology=v5e:16x16, or a mesh's Gin file such as meshes/v5e_256.gin."
            )
        slices = args.slices if args.slices is not None else (work.slices if work else 1)
        if slices < 1:
            raise ConfigError(f"--slices={slices}: must be at least 1.")
        return cls(
            name=args.name or names.check_name(names.suggestion(work.name) or work.name),
            work=work,
            slice=Slice.of(topology, args.accelerator_type, args.runtime_version, args.price_per_chip_hour)
            if topology
            else None,
            slices=slices,
            project=args.project,
            zone=args.zone,
            spot=args.spot,
            reservation=args.reservation,
            skip_preflight=args.skip_preflight,
            yes=args.yes,
            keep=args.keep,
            allow_uncommitted=args.allow_uncommitted,
            max_restarts=args.max_restarts,
            with_package=tuple(args.with_package),
            dry_run=args.dry_run,
            skip_gin_check=args.skip_gin_check,
            reserved=getattr(args, "reserved", False),  # TPU VMs alone
        )

    def located(self, commands: Commands) -> Request:
        """With project and zone, asked of gcloud where they are not given."""
        found = {}
        for name, key, check in (
            ("project", "project", names.check_project),
            ("zone", "compute/zone", names.check_zone),
        ):
            value = getattr(self, name)
            if not value and commands.dry_run:
                raise ConfigError(f"a dry run asks nobody, not even gcloud's configuration: give --{name}.")
            if not value:
                value = commands.read(["gcloud", "config", "get-value", key], check=False)
            if not value or value == "(unset)":
                raise ConfigError(f"--{name} is not given, and gcloud's configuration has none.")
            found[name] = check(value)
        return dataclasses.replace(self, **found)

    def in_bucket(self) -> Request:
        """The same, if all that runs writes to a bucket, as hosts of a slice have to."""
        if self.work is not None:
            flag = "--dir" if self.work.sweep else "--gin.MODEL_DIR"
            for path in dict.fromkeys([self.work.root, *(job.model_dir for job in self.work.jobs)]):
                names.check_bucket_path(path, flag)
        return self
