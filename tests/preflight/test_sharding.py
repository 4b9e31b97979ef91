"""What the sharded step does on a TPU slice, read from the program that the TPU compiler makes of it."""

import functools

import pytest

from perex_t5x.hardware.devices import tpu_devices
from perex_t5x.preflight import step
from tests import tiny
from tests.preflight.support import needs_libtpu

pytestmark = needs_libtpu

SIZES = [
    "models.T5Config.vocab_size = 1024",
    "models.T5Config.emb_dim = 512",
    "models.T5Config.num_heads = 4",
    "models.T5Config.head_dim = 128",
    "models.T5Config.mlp_dim = 1024",
    "models.T5Config.num_decoder_layers = 4",
    "models.T5Config.scan_layers = True",
    "models.T5Config.remat_policy = 'full'",
    "models.T5Config.dtype = 'bfloat16'",
    "models.T5Config.logits_via_embedding = False",
    "TASK_FEATURE_LENGTHS = {'targets': 128}",
]
LAYERS, MICROBATCHES, STATISTICS = 4, 2, 2
KERNELS = 7  # of a layer: query, key, value, out, wi_0, wi_1, wo
SMALL = 64 * 1024  # bytes: norms' scales, counts, losses


@functools.cache
def compiled(mesh, chips, microbatches, optimizer="micro_adam_msq", examples=2):
    """(trainer, report) of the step with `examples` a chip and microbatch."""
    devices = tpu_devices(chips)
    batch = examples * microbatches * len(devices)
    trainer, spec = step.build(
        ["models/tiny.gin", "runs/pretrain.gin", f"optimizers/{optimizer}.gin", f"meshes/{mesh}.gin"],
        [b for b in tiny.BINDINGS if "TASK" not in b and "T5Config" not in b]
        + [*SIZES, f"BATCH_SIZE = {batch}", f"trainer.Trainer.num_microbatches = {microbatches}"],
        devices,
    )
    return trainer, step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)


def kernels(trainer):
    """Bytes of all layers' kernels together, and of the embedding and the head, in float32."""
    config = trainer.model.config
    width, heads = config.emb_dim, config.num_heads * config.head_dim
    one_layer = 4 * width * heads + 3 * width * config.mlp_dim
    return 4 * one_layer, 4 * width * config.vocab_size


def large(report, **wanted):
    return [
        c
        for c in report.collectives
        if c.bytes > SMALL and all(getattr(c, name) == value for name, value in wanted.items())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["micro_adam_msq", "adamw"])
def test_data_parallel_steps_meet_once(optimizer):
    """Whatever the number of microbatches: no collective inside a loop."""
    trainer, report = compiled("dp", "v5e:4x4", MICROBATCHES, optimizer)
    assert large(report)
    assert not [c for c in report.collectives if c.loops]
    layer, table = kernels(trainer)
    statistics = STATISTICS if optimizer == "micro_adam_msq" else 1
    summed = sum(c.bytes_per_step for c in large(report, kind="all-reduce"))
    assert summed == pytest.approx(statistics * (LAYERS * layer + 2 * table), rel=0.02)


def test_fsdp_gathers_and_scatters_by_layer():
    trainer, report = compiled("fsdp", "v5e:4x4", MICROBATCHES)
    layer, _ = kernels(trainer)
    in_layers = [c for c in large(report) if len(c.loops) == 2]
    # Every kernel is gathered once in the forward pass and once in its remat, in the compute dtype: half of float32.
    gathered = [c for c in in_layers if c.kind == "all-gather"]
    assert sum(c.executions for c in gathered) == 2 * KERNELS * LAYERS * MICROBATCHES
    assert sum(c.bytes_per_step for c in gathered) == 2 * MICROBATCHES * LAYERS * layer // 2
    # Its statistics go out once, and each device keeps its part: along the first dimension of 4 x 4 always by a
    # reduce-scatter; of the quarter that is left the compiler may make one all-reduce for several kernels.
    assert {c.kind for c in in_layers} <= {"all-gather", "reduce-scatter", "all-reduce"}
    statistics = STATISTICS * MICROBATCHES * LAYERS * layer
    summed = {
        kind: sum(c.bytes_per_step for c in in_layers if c.kind == kind) for kind in ("reduce-scatter", "all-reduce")
    }
    assert summed["reduce-scatter"] >= statistics and summed["all-reduce"] <= 1.01 * statistics / 4
    assert sum(summed.values()) == pytest.approx(statistics * (1 + 1 / 4), rel=0.01)
    assert not large(report, kind="all-reduce", loops=())


def test_fsdp_holds_the_statistics_of_one_layer():
    trainer, report = compiled("fsdp", "v5e:4x4", MICROBATCHES)
    layer, table = kernels(trainer)
    # Everything that is not argument or result, activations included, takes less than two layers' statistics.
    assert report.temp_bytes < 2 * STATISTICS * layer < STATISTICS * LAYERS * layer
    state = 4 * (LAYERS * layer + 2 * table)  # parameters, and the optimizer's three averages
    assert report.argument_bytes == pytest.approx(state / 16, rel=0.05)


def assert_scales(few, many):
    assert 0 < many.cycles <= 1.05 * few.cycles
    assert 0 < many.temp_bytes <= 1.05 * few.temp_bytes


@pytest.mark.slow
def test_weak_scaling_of_data_parallelism():
    """16 and 256 chips at the same number of examples a chip: the same memory and work on each."""
    assert_scales(*(compiled("dp", chips, 1)[1] for chips in ("v5e:4x4", "v5e:16x16")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "v5e_256"])
def test_weak_scaling_of_fsdp(mesh):
    """Three layers as wide as those of 1_2b. (Of a narrow model, a 256th is less than a tile of the memory.)"""
    assert_scales(wide("fsdp", "v5e:4x4"), wide(mesh, "v5e:16x16"))


@functools.cache
def wide(mesh, chips):
    devices = tpu_devices(chips)
    trainer, spec = step.build(
        ["models/1_2b.gin", "runs/pretrain.gin", "optimizers/micro_adam_msq.gin", f"meshes/{mesh}.gin"],
        [
            "models.T5Config.num_decoder_layers = 3",
            "TASK_FEATURE_LENGTHS = {'targets': 1024}",
            f"BATCH_SIZE = {2 * len(devices)}",
        ],
        devices,
    )
    return step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)
