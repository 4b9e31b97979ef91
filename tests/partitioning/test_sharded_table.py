"""The step on every mesh equals the step on one device: four optimizers x five meshes, and each option on some of them.

Ten steps in double precision, where signs do not flip on rounding, of rows that differ in their number of tokens. Compared
are the losses and sums of all steps and the parameters after the last; in the table also the statistics at these parameters
and the examples' norms, in the order of the batch.

    python -m pytest tests/partitioning/test_sharded_table.py -n 2 -m "slow or not slow"      # everything
"""

import jax
import numpy as np
import pytest
from jax.tree_util import keystr

from tests.models.model_support import as_for_tpu
from tests.partitioning.sharding_support import (
    BATCH,
    MESHES,
    OPTIMIZERS,
    STATISTICS,
    STEPS,
    Row,
    assert_close,
    assert_equal,
    measured,
    run,
)

EIGHT = [mesh for mesh in MESHES if mesh != "one"]
TABLE = [name for name in OPTIMIZERS if name != "sgd"]
FSDP_TP, THREE_AXES = "fsdp 4 x tp 2", "replica 2 x fsdp 2 x tp 2"
DOUBLE = 1e-10  # seen: 2e-13
DROPOUT = (("dropout_rate", 0.1),)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def on_one_device(row, **changes):
    return run(Row(**{"mesh": "one", "optimizer": row.optimizer, "kind": row.kind, "sizes": row.sizes, **changes}))


# --- the table --------------------------------------------------------------------------------------------------------


# By default every kind of mesh with one optimizer, and plain gradients under FSDP and on all axes.
CELLS = [(mesh, optimizer) for mesh in EIGHT for optimizer in TABLE]
BY_DEFAULT = [(mesh, "micro_adam") for mesh in EIGHT if mesh != "tp 8"] + [("fsdp 8", "adamw"), (THREE_AXES, "adamw")]


@pytest.mark.parametrize("mesh,optimizer", [cell if cell in BY_DEFAULT else slow(*cell) for cell in CELLS])
def test_ten_steps_equal_those_of_one_device(mesh, optimizer):
    row = Row(mesh, optimizer)
    found, wanted = run(row), on_one_device(row)
    assert_equal(found, wanted, DOUBLE)
    statistics = measured(row)
    assert_close(statistics, measured(Row("one", optimizer)), DOUBLE)
    check_that_it_is_double(found, statistics)
    check_the_places_of_the_moments(found.state)
    if mesh == "fsdp 8":
        check_that_a_device_has_an_eighth(found.state)


def check_that_it_is_double(found, measurement):
    moments = [x for x in jax.tree.leaves(found.state.opt_state) if x.ndim]
    assert moments and len(measurement["norms"]) == BATCH and set(measurement["statistics"]) == set(STATISTICS)
    for x in (found.losses, *jax.tree.leaves((found.params, measurement)), *moments):
        assert x.dtype == np.float64


def check_the_places_of_the_moments(state):
    """Every array of the optimizer's state that is like a parameter lies where the parameter lies."""
    params = {
        keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(state.params)
    }
    for path, moment in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if moment.ndim == 0:
            continue
        name = keystr(path, simple=True, separator="/")
        (param,) = [x for n, x in params.items() if name.endswith("/" + n)]
        assert moment.sharding.is_equivalent_to(param.sharding, param.ndim), name


def check_that_a_device_has_an_eighth(state):
    """Of all matrices; scales of norms are whole everywhere."""
    arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    whole = [keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(state) if x.sharding.is_fully_replicated]
    assert all("norm" in name for name in whole if "param" in name) and any("norm" in name for name in whole)
    arrays = [x for x in arrays if not x.sharding.is_fully_replicated]
    for device in jax.devices():
        mine = sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)
        assert mine * 8 == sum(x.nbytes for x in arrays)


def test_the_table_could_fail():
    """Parameters move, differently by optimizer, and examples differ: an exchange of two would show in the norms."""
    one, other = on_one_device(Row("one")), on_one_device(Row("one", "sign_ema"))
    assert np.ptp(one.losses) > 0.01
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert np.max(np.abs(a - b)) > 1e-3
    norms = np.sort(measured(Row("one"))["norms"])
    assert np.min(np.diff(norms)) > 1e-4 * norms[-1]


# --- options ----------------------------------------------------------------------------------------------------------
# A row on a mesh, and its arguments that the run on one device has as well. The others change no number.

OPTIONS = {
    "dropout, microbatches in time": (Row(FSDP_TP, sizes=DROPOUT, arguments=(("num_microbatches", 2),)), ()),
    "dropout, one example at a time": (Row(THREE_AXES, sizes=DROPOUT, arguments=(("microbatch_size", 1),)), ()),
    "microbatches of the plain gradient": (Row(THREE_AXES, "adamw", arguments=(("num_microbatches", 2),)), ()),
    "groups": (Row(FSDP_TP, "micro_adam_msq", arguments=(("group_size", 2),)), ("group_size",)),
    "clipping": (Row(THREE_AXES, arguments=(("clip_norm", 1.0),)), ("clip_norm",)),
    "clipping for adamw": (Row("fsdp 8", "adamw", arguments=(("clip_norm", 1.0),)), ("clip_norm",)),
    "reduce-scatter in stages": (Row("fsdp 8 in stages"), ()),
    "plain reduce-scatter in stages": (Row("fsdp 8 in stages", "adamw"), ()),
    "a bad example": (Row(FSDP_TP, arguments=(("non_finite", "skip"),), bad=(3, 6)), ("non_finite",)),
}
SLOW_OPTIONS = {
    "clipping", "clipping for adamw", "dropout, microbatches in time", "groups", "plain reduce-scatter in stages",
}  # fmt: skip


@pytest.mark.parametrize("name", [slow(n) if n in SLOW_OPTIONS else n for n in OPTIONS])
def test_options(name):
    row, shared = OPTIONS[name]
    arguments = tuple((k, v) for k, v in row.arguments if k in shared)
    wanted = on_one_device(row, arguments=arguments, bad=row.bad)
    assert_equal(run(row), wanted, DOUBLE)
    # The option does something: without it the numbers are others.
    if row.bad is not None:
        assert wanted.sums["non_finite_examples"].tolist() == [float(step == row.bad[0]) for step in range(STEPS)]
    elif shared or row.sizes:
        assert np.max(np.abs(on_one_device(row, sizes=()).losses - wanted.losses)) > 1e-4


@pytest.mark.parametrize("mesh,optimizer", [("fsdp 8", "micro_adam"), (THREE_AXES, "adamw")])
def test_bfloat16_transport(mesh, optimizer):
    """Sums travel with 8 bits and are added in full: losses within 1e-3 of the run without, and not equal to it."""
    row = Row(mesh, optimizer, arguments=(("transport_dtype", "bfloat16"),))
    found, wanted = run(row), on_one_device(row)
    assert_close(found.losses, wanted.losses, 1e-3)
    assert np.max(np.abs(found.losses - wanted.losses)) > 1e-8


@pytest.mark.parametrize("optimizer", ["micro_adam", slow("adamw"), slow("micro_adam_msq")])
def test_single_precision(optimizer):
    """The Adam family in float32: losses within 1e-6, parameters within 1e-3. (Signs flip on rounding: no sign_ema.)"""
    row = Row(FSDP_TP, optimizer, sizes=(("dtype", "float32"),))
    found, wanted = run(row), on_one_device(row)
    assert {x.dtype for x in jax.tree.leaves(found.params)} == {np.dtype(np.float32)}
    assert_close(found.losses, wanted.losses, 1e-6)
    assert_close(found.params, wanted.params, 1e-3)


# --- models -----------------------------------------------------------------------------------------------------------

NETWORKS = {
    "encoder-decoder": Row("fsdp 8", kind="encoder_decoder"),
    "encoder-decoder, tied": Row("fsdp 8", kind="encoder_decoder", sizes=(("logits_via_embedding", True),)),
    "tied": Row("fsdp 8", sizes=(("logits_via_embedding", True),)),
    "unrolled": Row("fsdp 8", sizes=(("scan_layers", False),)),
    "unrolled without remat": Row("fsdp 8", sizes=(("remat_policy", "none"), ("scan_layers", False))),
    "without remat": Row("fsdp 8", sizes=(("remat_policy", "none"),)),
    "minimal remat": Row("fsdp 8", sizes=(("remat_policy", "minimal"),)),
    "grouped heads": Row("fsdp 8", sizes=(("num_kv_heads", 2),)),
    "own network": Row("fsdp 8", kind="own"),
    "own network on three axes": Row(THREE_AXES, kind="own"),
}
SLOW = {
    "encoder-decoder, tied", "tied", "unrolled", "unrolled without remat", "without remat", "minimal remat", "grouped heads",
}  # fmt: skip


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in NETWORKS])
def test_networks(name):
    row = NETWORKS[name]
    assert_equal(run(row), on_one_device(row), DOUBLE)


@pytest.mark.slow
def test_heads_of_products_are_divided_over_devices(monkeypatch):
    """Layers as programs for TPUs have them: heads are an axis of the projections' products."""
    row = Row(FSDP_TP, sizes=(("num_kv_heads", 4), ("remat_policy", "save:context,mlp_in")))
    wanted = on_one_device(row)
    as_for_tpu(monkeypatch)
    assert_equal(run(row), wanted, DOUBLE)


def test_remat_changes_no_number():
    wanted = on_one_device(Row("one"))
    assert_equal(run(NETWORKS["without remat"]), wanted, DOUBLE)


def test_own_network_holds_parts():
    """Its parameters are gathered by the trainer, so what is tested above is not a replicated network."""
    params = run(NETWORKS["own network"]).state.params
    assert params["wi"].sharding.shard_shape(params["wi"].shape) == (2, 20)
    assert params["bias"].sharding.is_fully_replicated and params["odd"].sharding.is_fully_replicated
