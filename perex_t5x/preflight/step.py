"""The train step of a Gin configuration, compiled for devices that this machine need not have.

    target = CompileTarget("v5e:4x4")
    trainer, spec = build(["models/150m.gin", "runs/pretrain.gin", "meshes/fsdp.gin"], bindings, target.devices())
    compiled = compile_step(trainer, spec)
    print(report(compiled, trainer.partitioner.mesh).cycles)

It is exactly the step that `perex_t5x.train` would run there. No data is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import gin
import jax
from jax.sharding import Mesh

from perex_t5x import gin_utils
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.hardware.chips import Chip, chip_of
from perex_t5x.hardware.devices import native_noise_hidden, tpu_devices
from perex_t5x.hardware.hlo.program import Collective, Program
from perex_t5x.hardware.slices import canonical_topology, chip_of_topology, known_topologies, num_chips
from perex_t5x.preflight.breakdown import Part, breakdown
from perex_t5x.preflight.kernel_cycles import Schedules, kernel_cycles
from perex_t5x.preflight.overlap import with_hidden_seconds

if TYPE_CHECKING:
    from perex_t5x.preflight.report_cache import ReportCache
    from perex_t5x.trainer import Trainer

BatchSpec = Mapping[str, jax.ShapeDtypeStruct]  # of the global batch

# Macros of a run that its step does not depend on, so they need not be given.
_FREE_MACROS = {
    "MODEL_DIR": "'preflight'",
    "TRAIN_STEPS": "1",
    "MIXTURE_OR_TASK_NAME": "'preflight'",
    "INITIAL_CHECKPOINT_PATH": "'preflight'",
}


@dataclass(frozen=True)
class CompileTarget:
    """What a step is compiled for: a TPU slice, several of them, or fake CPU devices.

    Attributes:
      topology: of one slice, 'v5e:4x4'; '' for fake CPU devices.
      slices: how many of them.
      cpus: how many fake CPU devices; 0 for TPU slices.
    """

    topology: str
    slices: int = 1
    cpus: int = 0

    @classmethod
    def from_flags(cls, args: Any, default: str | None, default_slices: int) -> CompileTarget:
        """What the flags name; otherwise the Gin files' macros TOPOLOGY and NUM_SLICES."""
        if args.devices:
            return cls("", cpus=args.devices)
        name = args.topology or default
        if not name:
            raise ConfigError(
                "nothing to compile for: give --topology=v5e:4x4, a mesh file with a TOPOLOGY such as meshes/v5e_16.gin, "
                "or --devices=8 for fake CPU devices."
            )
        return cls(canonical_topology(name), default_slices if args.slices is None else args.slices)

    def devices(self) -> list[Any]:
        return jax.devices("cpu")[: self.cpus] if self.cpus else tpu_devices(self.topology, self.slices)

    @property
    def chip(self) -> Chip | None:
        return chip_of_topology(self.topology) if self.topology else None

    def larger(self) -> Iterator[CompileTarget]:
        """The larger slices of the same chip, in order of size.

        >>> [target.topology for target in CompileTarget("v5e:8x8").larger()]
        ['v5e:8x16', 'v5e:16x16']
        """
        if not self.topology:
            return
        for name in known_topologies(chip_of_topology(self.topology).name):
            if num_chips(name) > num_chips(self.topology):
                yield replace(self, topology=name)

    def __str__(self) -> str:
        """
        >>> str(CompileTarget("v5e:4x4", 2)), str(CompileTarget("", cpus=8))
        ('2 x v5e:4x4', '8 fake CPU devices')
        """
        if self.cpus:
            return f"{self.cpus} fake CPU devices"
        return self.topology if self.slices == 1 else f"{self.slices} x {self.topology}"


# --- the configuration ------------------------------------------------------------------------------------------------


class _Devices(list):
    """Gin deep-copies bound values; devices must stay the same objects."""

    def __deepcopy__(self, memo: Any) -> _Devices:
        return self


def parse_gin(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> None:
    """Parses a run's Gin files and bindings, filling in macros that the step does not depend on, such as MODEL_DIR.

    Discards what was parsed before.
    """
    gin.clear_config()
    try:
        gin_utils.parse_gin_flags(search_paths, files, bindings)
    except gin_utils.MissingMacroError as e:
        free = [name for name in e.names if name in _FREE_MACROS]
        if not free:
            raise
        filled = [f"{name} = {_FREE_MACROS[name]}" for name in free]
        gin_utils.parse_gin_flags(search_paths, files, [*bindings, *filled])


def topology_macro() -> tuple[str | None, int]:
    """(TOPOLOGY, NUM_SLICES) of the parsed Gin files; (None, 1) where a file names none."""

    def value(name: str, default: Any) -> Any:
        try:
            return gin.query_parameter(f"%{name}")
        except ValueError:
            return default

    return value("TOPOLOGY", None), value("NUM_SLICES", 1)


def bind_devices(devices: Sequence[Any]) -> None:
    """Has the parsed Gin configuration build its mesh from these devices; raises `ConfigError` where it cannot."""
    try:
        with gin.unlock_config():
            gin.bind_parameter("perex_t5x.partitioning.PjitPartitioner.devices", _Devices(devices))
    except ValueError as e:
        raise ConfigError("the Gin files use no perex_t5x.partitioning.PjitPartitioner, which preflight needs.") from e


def build_parsed(devices: Sequence[Any]) -> tuple[Trainer, BatchSpec]:
    """The trainer of the parsed Gin configuration on these devices, and shapes and dtypes of its global batch."""
    from perex_t5x import train as train_script
    from perex_t5x.models.protocol import feature_converter_cls, sharded_dimensions

    bind_devices(devices)
    arguments = gin.get_bindings(train_script.train)
    missing = [name for name in ("model", "partitioner", "trainer_cls", "train_dataset_cfg") if name not in arguments]
    if missing:
        raise ConfigError(
            f"the Gin files bind no {missing[0]} on perex_t5x.train.train: give those of a training, such as "
            "--gin_file=models/150m.gin --gin_file=runs/pretrain.gin."
        )
    model, partitioner = arguments["model"], arguments["partitioner"]
    trainer = arguments["trainer_cls"](model=model, partitioner=partitioner)
    trainer.check_batch_size(arguments["train_dataset_cfg"].batch_size)
    partitioner.check_model(sharded_dimensions(model))
    return trainer, _batch_spec(arguments["train_dataset_cfg"], feature_converter_cls(model))


def build(files: Sequence[str], bindings: Sequence[str], devices: Sequence[Any]) -> tuple[Trainer, BatchSpec]:
    """`parse_gin`, then `build_parsed`."""
    parse_gin(files, bindings)
    return build_parsed(devices)


def _batch_spec(cfg: Any, converter_cls: type) -> BatchSpec:
    """Shapes and dtypes of the global batch from the lengths alone: the task need not be known here."""
    from perex_t5x.data.feed import spec_of

    if not cfg.task_feature_lengths:
        raise ConfigError(
            "TASK_FEATURE_LENGTHS is needed to know the shapes, such as --gin.TASK_FEATURE_LENGTHS=\"{'targets': 1024}\"."
        )
    missing = sorted(set(converter_cls.TASK_FEATURES) - set(cfg.task_feature_lengths))
    if missing:
        given = dict(cfg.task_feature_lengths)
        raise ConfigError(f"TASK_FEATURE_LENGTHS = {given}: the model also needs {', '.join(missing)}.")
    return spec_of(cfg, converter_cls(pack=cfg.pack), dict(cfg.task_feature_lengths))


# --- compiling and reading --------------------------------------------------------------------------------------------


class DoesNotFitError(ConfigError):
    """The step needs more memory than a device has. `refusal` is the compiler's message."""

    def __init__(self, refusal: str):
        super().__init__(
            f"the step does not fit on this topology: {refusal} Try more Trainer.num_microbatches, a smaller "
            "Trainer.microbatch_size, meshes/fsdp.gin, or a larger slice."
        )
        self.refusal = refusal


def lower_step(trainer: Trainer, batch_spec: BatchSpec) -> Any:
    """Traces the trainer's step for the devices of its mesh: what `Trainer.compiled_step` compiles."""
    shapes, shardings, _ = trainer.abstract_state({name: spec.shape for name, spec in batch_spec.items()})
    return trainer.lowered_step(shapes, shardings, batch_spec)


def compile_lowered(lowered: Any) -> Any:
    """Compiles it, quietly; raises `DoesNotFitError` where it needs more memory than a device has."""
    refusal = ""
    with native_noise_hidden():
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            refusal = str(e).partition("RESOURCE_EXHAUSTED:")[2].strip().splitlines()[0]
    raise DoesNotFitError(refusal)


def compile_step(trainer: Trainer, batch_spec: BatchSpec) -> Any:
    """Compiles the trainer's step for the devices of its mesh, and returns JAX's compiled program.

    Raises `DoesNotFitError` where the step does not fit into the memory of a device.
    """
    return compile_lowered(lower_step(trainer, batch_spec))


@dataclass(frozen=True)
class StepReport:
    """What one device needs for a step, in bytes and cycles.

    Attributes:
      argument_bytes: state and batch.
      output_bytes: the new state and the metrics.
      alias_bytes: outputs that alias donated arguments.
      temp_bytes: everything in between: activations, gradients, statistics, gathered parameters.
      code_bytes: the program itself.
      cycles: the compiler's estimate, without collectives and the instructions in `unestimated`; 0 for a CPU.
      collectives: one entry for each in the program, with its executions per step.
      unestimated: names of instructions that take time and have no estimate.
      chip: of the devices; None for a CPU.
      parts: where the cycles go, and the lower bound of each part; empty for a CPU.
      has_schedules: whether that bound has the static schedules of all instructions, not of the kernels alone.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    cycles: int
    collectives: tuple[Collective, ...]
    unestimated: tuple[str, ...]
    chip: Chip | None
    parts: tuple[Part, ...] = ()
    has_schedules: bool = False

    @property
    def bound(self) -> int:
        """No step of this program takes fewer cycles: see `breakdown`."""
        return sum(part.bound for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """All that is in a device's memory at the same time."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def seconds(self) -> float | None:
        """`cycles` at the chip's clock."""
        return self.cycles / self.chip.clock_hz if self.chip else None


def program_text(compiled: Any) -> str:
    """`compiled.as_text()`, with the large constants where kernels may read their masks from them.

    JAX's function has no option for it; the type of the printer's options is jaxlib's own.
    """
    text = compiled.as_text()
    if "tpu_custom_call" not in text or "constant({...})" not in text:
        return text
    try:
        from jaxlib._hlo import HloPrintOptions

        options = HloPrintOptions()
        options.print_large_constants = True
        (module,) = compiled.runtime_executable().hlo_modules()
    except (AttributeError, ImportError, ValueError):
        return text  # masks then count as causal
    return module.to_string(options)


def report(
    compiled: Any, mesh: Mesh, cache: ReportCache | None = None, schedules: Schedules | None = None
) -> StepReport:
    """Reads a compiled program; the cycles of its kernels are kept in `cache`."""
    memory = compiled.memory_analysis()
    try:
        program = Program(program_text(compiled))
    except jax.errors.JaxRuntimeError as e:
        raise TrainingError(
            f"the step compiles, but jaxlib {metadata.version('jaxlib')} cannot print the compiled program: {e} "
            "Try another version of libtpu."
        ) from e
    chip = chip_of(mesh.devices.flat[0])
    kernels = {} if chip is None else kernel_cycles(program, chip, cache)
    collectives = tuple(program.collectives(mesh))
    if chip is not None:
        collectives = with_hidden_seconds(program, collectives, chip, kernels)
    return StepReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        cycles=program.cycles(kernels),
        collectives=collectives,
        unestimated=tuple(e.instruction.name for e in program.unestimated(kernels)),
        chip=chip,
        parts=() if chip is None else breakdown(program, chip, kernels, schedules and schedules.of(program)),
        has_schedules=schedules is not None and chip is not None,
    )
