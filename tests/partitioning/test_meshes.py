"""The shipped mesh files: what is split over what, and that they train."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from perex_t5x import gin_utils
from perex_t5x.hardware.devices import has_libtpu, tpu_devices
from perex_t5x.hardware.slices import canonical_topology, num_chips, num_devices
from perex_t5x.preflight import step
from tests import tiny

FILES = ("models/tiny.gin", "runs/pretrain.gin")
GENERAL = {  # on 8 devices: mesh, and how an MLP's first kernel (embed, mlp) is split
    "dp": ((1, 8, 1), P(None, None, "model")),
    "fsdp": ((1, 8, 1), P("data", None, "model")),
    "tp": ((1, 4, 2), P(None, None, "model")),
    "fsdp_tp": ((1, 4, 2), P("data", None, "model")),
    "multislice": ((2, 4, 1), P("data", None, "model")),
}
SHIPPED = {p.stem: p for p in sorted((Path(gin_utils.shipped_gin_dir()) / "meshes").glob("*.gin"))}
# Compiled for by default: one axis, all axes, a torus of two and of three dimensions, slices of several.
COMPILED = ("tp", "multislice", "v5e_256", "v5p_128")
PODS = [name for name in SHIPPED if name not in GENERAL]
needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed (extra 'tpu')")


def build(name, devices, *bindings):
    return step.build([*FILES, f"meshes/{name}.gin"], [*tiny.BINDINGS, *bindings], devices)


def test_all_are_here():
    assert set(GENERAL) <= set(SHIPPED)
    assert {"v5e_16", "v5e_256", "v5p_128", "v6e_256", "v4_128", "tpu7x_128"} <= set(PODS)


@pytest.mark.parametrize("name", list(GENERAL))
def test_general_meshes(name):
    shape, kernel = GENERAL[name]
    trainer, spec = build(name, jax.devices())
    assert tuple(trainer.partitioner.mesh.shape.values()) == shape
    _, shardings, _ = trainer.abstract_state({k: s.shape for k, s in spec.items()})
    wi = next(
        s for path, s in jax.tree_util.tree_leaves_with_path(shardings.params) if "wi_0" in jax.tree_util.keystr(path)
    )
    wanted = [axis for axis in kernel if axis in ("data", "model")]
    found = [axis for axis in wi.spec if axis is not None]
    assert found == wanted
    moments = [s for s in jax.tree.leaves(shardings.opt_state) if s == wi]
    assert len(moments) >= 2  # Adam's two lie where the parameter lies


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "fsdp_tp" else pytest.mark.slow) for n in GENERAL])
def test_general_meshes_train(name, tmp_path):
    last, state = tiny.train(tmp_path, "TRAIN_STEPS = 1", files=(*FILES, f"meshes/{name}.gin"))
    assert last == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))
    assert np.isfinite(tiny.losses(tmp_path)[1])


def test_macros_change_the_mesh():
    trainer, _ = build("tp", jax.devices(), "MODEL_PARALLEL = 4")
    assert tuple(trainer.partitioner.mesh.shape.values()) == (1, 2, 4)
    trainer, _ = build("multislice", jax.devices(), "NUM_SLICES = 4", "MODEL_PARALLEL = 2", "PARAMETER_DIMS = 1")
    assert tuple(trainer.partitioner.mesh.shape.values()) == (4, 1, 2)
    assert ("embed", "data") not in trainer.partitioner.logical_axis_rules


def pod(name, *bindings):
    """The trainer of a tiny run on a pod, one example for each chip, and its batch."""
    step.parse_gin([*FILES, f"meshes/{name}.gin"], [*tiny.BINDINGS, *bindings])
    devices = tpu_devices(*step.topology_macro())
    return build(name, devices, f"BATCH_SIZE = {len(devices)}", *bindings)


@needs_libtpu
@pytest.mark.parametrize("name", PODS)
def test_pods(name):
    step.parse_gin([*FILES, f"meshes/{name}.gin"], tiny.BINDINGS)
    named, _ = step.topology_macro()
    assert canonical_topology(name.replace("_", "-")) == named  # the file is called what the cloud calls it
    trainer, _ = pod(name)
    devices = num_devices(named)
    assert f"{num_chips(named)} chips" in SHIPPED[name].read_text()
    if name.endswith("_256"):  # each axis along one dimension of the torus
        assert tuple(trainer.partitioner.mesh.shape.values()) == (16, 16, 1)
        assert trainer.partitioner.scatter_stages == {}
        trainer, _ = pod(name, "partitioning.PjitPartitioner.ici_mesh_shape = (1, 64, 4)")
    else:
        assert tuple(trainer.partitioner.mesh.shape.values()) == (1, devices, 1)
        trainer, _ = pod(name, "MODEL_PARALLEL = 4")
    assert tuple(trainer.partitioner.mesh.shape.values()) == (1, devices // 4, 4)


@needs_libtpu
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in COMPILED else pytest.mark.slow) for n in SHIPPED])
def test_they_compile(name):
    """For the file's own slice; those that name none for 8 chips, or two times 4."""
    wide = ("models.T5Config.emb_dim = 256", "models.T5Config.mlp_dim = 256", "models.T5Config.num_decoder_layers = 1")
    if name in PODS:
        trainer, spec = pod(name, *wide)
    else:
        slices = 2 if name == "multislice" else 1
        devices = tpu_devices({1: "v5e:2x4", 2: "v5e:2x2"}[slices], slices)
        trainer, spec = build(name, devices, "BATCH_SIZE = 8", *wide)
    found = step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)
    assert found.cycles > 0
    assert any(c.axes == ("data",) and c.network == "ICI" for c in found.collectives)
    assert any(c.network == "DCN" for c in found.collectives) == (name == "multislice")
    assert found.peak_bytes < found.chip.hbm_bytes
