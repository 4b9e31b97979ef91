"""The real train step, compiled for devices that are not there."""

import gin
import jax
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.devices import tpu_devices
from perex_t5x.preflight import step
from tests import tiny
from tests.preflight.support import needs_libtpu

FILES = ["models/tiny.gin", "runs/pretrain.gin"]
BINDINGS = [b for b in tiny.BINDINGS if "TASK_NAME" not in b and "TASK_MODULE" not in b]


def build(devices, *bindings, files=()):
    return step.build([*FILES, *files], [*BINDINGS, *bindings], devices)


def test_the_step_on_fake_devices():
    trainer, spec = build(jax.devices()[:4], files=["meshes/dp.gin"])
    assert {s.shape for s in spec.values()} == {(16, tiny.LENGTH)}
    assert trainer.partitioner.mesh.shape["data"] == 4
    found = step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)
    shapes, _, _ = trainer.abstract_state({k: s.shape for k, s in spec.items()})
    params = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.params))
    # Parameters and two moments on every device, the gradient in one sum over `data`.
    assert found.argument_bytes >= 3 * params
    assert found.peak_bytes >= found.argument_bytes + found.temp_bytes
    summed = sum(c.bytes_per_step for c in found.collectives if c.axes == ("data",))
    assert params <= summed <= 1.01 * params + 1024
    assert (found.cycles, found.chip, found.seconds) == (0, None, None)


def test_shapes_are_those_of_the_feed():
    """The same as training finds them, from lengths alone."""
    from perex_t5x import train as train_script
    from perex_t5x.data.feed import batch_spec

    _, spec = build(
        jax.devices()[:1], f"MIXTURE_OR_TASK_NAME = '{tiny.TASK}'", "MIXTURE_OR_TASK_MODULE = 'tests.tiny_tasks'"
    )
    arguments = gin.get_bindings(train_script.train)
    assert spec == batch_spec(arguments["train_dataset_cfg"], arguments["model"].FEATURE_CONVERTER_CLS())


@needs_libtpu
def test_the_step_on_a_slice():
    trainer, spec = build(tpu_devices("v5e:2x2"), "trainer.Trainer.num_microbatches = 2")
    found = step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)
    assert found.cycles > 0
    assert found.chip.name == "v5e"
    assert 0 < found.seconds < 1
    assert {c.network for c in found.collectives} == {"ICI"}


@needs_libtpu
def test_what_does_not_fit():
    trainer, spec = build(tpu_devices("v5e:1x1"), "models.T5Config.emb_dim = 65536", "models.T5Config.mlp_dim = 65536")
    with pytest.raises(ConfigError, match="does not fit on this topology: .*HBM.*num_microbatches"):
        step.compile_step(trainer, spec)


def test_bad_input():
    with pytest.raises(ConfigError, match="required but not given: TASK_FEATURE_LENGTHS"):
        step.build(FILES, [], jax.devices()[:1])
    with pytest.raises(ConfigError, match="not divisible by the 8 data shards"):
        build(jax.devices(), "BATCH_SIZE = 12")
    with pytest.raises(ConfigError, match="num_heads = 4 of the model is not divisible by 8"):
        build(jax.devices(), "MODEL_PARALLEL = 8", files=["meshes/tp.gin"])
    with pytest.raises(ConfigError, match="bind no model on perex_t5x.train.train"):
        step.build(["meshes/dp.gin"], [], jax.devices()[:1])


def test_the_topology_of_a_pod():
    step.parse_gin([*FILES, "meshes/v5p_128.gin"], BINDINGS)
    assert step.topology_macro() == ("v5p:4x4x4", 1)
    step.parse_gin([*FILES, "meshes/multislice.gin"], [*BINDINGS, "NUM_SLICES = 4"])
    assert step.topology_macro() == (None, 4)
