"""The rows that each host of a pod reads: every shipped mesh on the TPU compiler's devices, which know their hosts."""

import functools
from pathlib import Path

import gin
import numpy as np
import pytest

from perex_t5x import gin_utils
from perex_t5x.data import device_batches, streaming
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.devices import has_libtpu, tpu_devices
from perex_t5x.hardware.slices import num_chips
from perex_t5x.partitioning import PjitPartitioner

pytestmark = pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed (extra 'tpu')")

ROWS_PER_SHARD = 2
TOPOLOGIES = {  # (topology, slices); 256 chips twice: as many as a pod of v5e
    "v5e": [("v5e:4x4", 1), ("v5e:8x8", 1), ("v5e:16x16", 1), ("v5e:4x4", 2), ("v5e:16x16", 2)],
    "v6e": [("v6e:4x4", 1), ("v6e:8x8", 1), ("v6e:16x16", 1), ("v6e:4x4", 2), ("v6e:16x16", 2)],
    "v4": [("v4:2x2x4", 1), ("v4:4x4x4", 1), ("v4:4x8x8", 1), ("v4:2x2x4", 2)],
    "v5p": [("v5p:2x2x4", 1), ("v5p:4x4x4", 1), ("v5p:4x8x8", 1), ("v5p:2x2x4", 2)],
    "tpu7x": [("tpu7x:2x2x4", 1), ("tpu7x:4x4x4", 1), ("tpu7x:4x8x8", 1), ("tpu7x:2x2x4", 2)],
}
EVERYWHERE = [where for kind in TOPOLOGIES.values() for where in kind]
MESHES = sorted(path.stem for path in (Path(gin_utils.shipped_gin_dir()) / "meshes").glob("*.gin"))
devices_of = functools.cache(tpu_devices)


def cases():
    for mesh in MESHES:
        chip = mesh.split("_")[0]
        text = (Path(gin_utils.shipped_gin_dir()) / "meshes" / f"{mesh}.gin").read_text()
        has_model = "MODEL_PARALLEL" in text
        for topology, slices in TOPOLOGIES.get(chip, EVERYWHERE):
            for bindings in [(), *([("MODEL_PARALLEL = 4",), ("MODEL_PARALLEL = 8",)] if has_model else [])]:
                yield mesh, topology, slices, bindings


def partitioner(mesh, topology, slices, bindings):
    gin.clear_config()
    gin_utils.parse_gin_flags((), [f"meshes/{mesh}.gin"], list(bindings))
    made = gin.get_bindings(PjitPartitioner)
    return PjitPartitioner(**made | {"devices": devices_of(topology, slices)})


def filled(sharding, batch_size):
    """Row of the batch -> (data shard, number in it), as the hosts fill it; all that hold a row agree on it."""
    shards, rows = streaming.data_shards(sharding, batch_size), {}
    for device, index in sharding.devices_indices_map((batch_size, 1)).items():
        shard = shards[device.process_index]
        for row in range(*device_batches.row_range(index, batch_size)):
            place = (shard.index, shard.offset(row))
            assert rows.setdefault(row, place) == place, "two devices of a replica group hold different examples"
    return shards, rows


def test_each_row_is_read_once_on_every_mesh():
    refused, interleaved = set(), 0
    for mesh, topology, slices, bindings in cases():
        try:
            made = partitioner(mesh, topology, slices, bindings)
        except ConfigError as e:
            assert "ici_mesh_shape = (16, 16, 1) has 256 devices" in str(e)
            refused.add((mesh, num_chips(topology)))
            continue
        batch_size = made.data_parallel_size * ROWS_PER_SHARD
        shards, rows = filled(made.data_sharding, batch_size)
        where = (mesh, topology, slices, bindings)
        parts = {s.parts for s in shards.values()}
        assert len(parts) == 1 and set(shards) == {d.process_index for d in devices_of(topology, slices)}, where
        parts = parts.pop()
        each = [(shard, number) for shard in range(parts) for number in range(batch_size // parts)]
        assert sorted(rows) == list(range(batch_size)) and sorted(rows.values()) == each, where
        # Their numbers depend on the sharding alone: in the order of the shards' first rows.
        assert [rows[min(r for r in rows if rows[r][0] == i)] for i in range(parts)] == [(i, 0) for i in range(parts)]
        if made.mesh.shape["model"] == 1:
            assert parts == len(shards), where  # nobody reads for another
        interleaved += any(len(s.rows) > 1 for s in shards.values())
    # Not applicable: the two files for whole pods fix the mesh of 256 chips.
    assert refused == {(mesh, chips) for mesh in ("v5e_256", "v6e_256") for chips in (16, 64)}
    assert interleaved > 40  # hosts are blocks of chips: the case that matters is here


def test_the_headline_mesh():
    """replica 16 x data 16 on a v5e pod: a host's 2 x 2 chips are two pairs of neighbours, 16 shards apart."""
    shards = streaming.data_shards(partitioner("v5e_256", "v5e:16x16", 1, ()).data_sharding, 512)
    assert len(shards) == 64
    assert shards[0] == streaming.DataShard(64, 0, ((0, 4), (32, 36)))
    assert sorted(s.index for s in shards.values()) == list(range(64))
    assert np.sum([stop - start for s in shards.values() for start, stop in s.rows]) == 512
