"""Compiled programs of known content: loops, collectives, cycles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from perex_t5x.hardware.chips import CHIPS
from perex_t5x.hardware.devices import tpu_devices
from perex_t5x.hardware.hlo import groups
from perex_t5x.hardware.hlo.program import Program
from tests.preflight.support import (
    PLATFORMS,
    compile_on_one_chip,
    compile_sharded,
    cpu_mesh,
    mesh_of,
    needs_libtpu,
    tpu_mesh,
)

DATA = P(("replica", "data"))


def _layers(x, w):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]


def collectives(compiled, mesh):
    return Program(compiled.as_text()).collectives(mesh)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_loops_multiply(platform):
    def nested(x):
        def outer(carry, _):
            # Each turn needs the one before, so that nothing can be moved out of the loop.
            def step(i, c):
                return jnp.tanh(jax.lax.psum(c * 2.0, ("replica", "data")))

            return jax.lax.fori_loop(2, 7, step, carry), None

        return jax.lax.scan(outer, x, None, length=3)[0]

    mesh = mesh_of(platform)
    (found,) = collectives(compile_sharded(nested, mesh, (64, 256), in_spec=DATA, out_spec=DATA), mesh)
    assert (found.kind, found.axes, found.loops, found.executions) == ("all-reduce", ("replica", "data"), (3, 5), 15)
    assert found.bytes == 64 // (mesh.shape["replica"] * mesh.shape["data"]) * 256 * 4
    assert found.bytes_per_step == 15 * found.bytes
    assert found.network == ("" if platform == "cpu" else "ICI")
    assert found.group_size == mesh.shape["replica"] * mesh.shape["data"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_kind(platform):
    mesh = mesh_of(platform)
    data, model = mesh.shape["data"], mesh.shape["model"]

    def kinds(x):
        x = jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
        x = jax.lax.all_gather(jnp.sin(x), "model", axis=0, tiled=True)
        x = jax.lax.ppermute(jnp.cos(x), "data", [(i, (i + 1) % data) for i in range(data)])
        x = jax.lax.all_to_all(jnp.exp(x), "model", split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.psum((jnp.sin(x), x.sum(0)), ("replica", "data", "model"))

    found = collectives(compile_sharded(kinds, mesh, (512, 256)), mesh)
    whole = 512 * 256 * 4
    part = whole // data * model  # of the gathered array
    assert [(c.kind, c.axes, c.bytes, c.loops) for c in found] == [
        ("reduce-scatter", ("data",), whole, ()),
        ("all-gather", ("model",), part, ()),
        ("collective-permute", ("data",), part, ()),
        ("all-to-all", ("model",), part, ()),
        ("all-reduce", ("replica", "data", "model"), part + 256 * model * 4, ()),
    ]
    assert found[-1].arrays == 2  # two sums in one
    assert found[-1].dtypes == ("f32",)


@needs_libtpu
def test_a_scattered_all_reduce_is_a_reduce_scatter():
    mesh = tpu_mesh((2, 4, 2))

    def scatter(x):
        return jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)

    compiled = compile_sharded(scatter, mesh, (4096, 1024), out_spec=P("data"))
    assert "all-reduce-scatter" in compiled.as_text()  # how v5e writes large ones; else this test has lost its subject
    found = [c for c in collectives(compiled, mesh) if c.kind != "collective-permute"]  # of the padding
    assert [(c.kind, c.axes, c.bytes) for c in found] == [("reduce-scatter", ("data",), 4096 * 1024 * 4)]


@needs_libtpu
def test_products_that_hide_a_gather():
    """FSDP as the compiler's partitioner does it: permutations in a loop around parts of the product."""
    mesh = tpu_mesh((1, 16, 1))
    shapes = [((4096, 1024), P("data")), ((12, 1024, 1024), P(None, "data"))]
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in shapes)
    compiled = jax.jit(_layers, out_shardings=NamedSharding(mesh, P("data"))).lower(x, w).compile()
    found = collectives(compiled, mesh)
    assert {c.axes for c in found} == {("data",)}
    gathered = [c for c in found if c.part_of == "all-gather" or c.kind == "all-gather"]
    assert gathered
    # Together they move each layer's weight once: all parts but this device's own.
    moved = sum(c.bytes_per_step for c in found if c.kind == "collective-permute")
    whole = sum(c.bytes_per_step for c in found if c.kind == "all-gather")
    layer = 1024 * 1024 * 2
    assert 0.9 * 12 * layer <= moved + whole <= 1.1 * 12 * layer
    assert all(c.loops[0] in (11, 12) for c in gathered)


@needs_libtpu
def test_a_gather_that_runs_beside_others_counts_once():
    """The TPU spreads one all-gather over several fusions: its start, the products it overlaps with, its end."""
    mesh = tpu_mesh((1, 16, 1))

    def step(x, w, v):
        gathered = jax.lax.all_gather(w, "data", axis=0, tiled=True)
        for _ in range(4):
            x = jnp.tanh(x @ v)
        return x @ gathered

    arguments = [((256, 2048), P("data")), ((2048, 2048), P("data")), ((2048, 2048), P())]
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=tuple(s for _, s in arguments), out_specs=P("data"), check_vma=False
    )
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in arguments]
    compiled = jax.jit(mapped).lower(*given).compile()
    assert compiled.as_text().count(" all-gather(") > 1
    assert [(c.kind, c.bytes) for c in collectives(compiled, mesh)] == [("all-gather", 2048 * 2048 * 2)]


@needs_libtpu
def test_between_slices():
    mesh = tpu_mesh((1, 8, 2), num_slices=2)

    def step(x):
        part = jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
        return jax.lax.psum(part, "replica")

    found = collectives(compile_sharded(step, mesh, (4096, 1024), out_spec=P("data")), mesh)
    whole = 4096 * 1024 * 4
    assert [(c.kind, c.axes, c.network, c.bytes) for c in found if c.kind != "collective-permute"] == [
        ("reduce-scatter", ("data",), "ICI", whole),
        ("all-reduce", ("replica",), "DCN", whole // 8),
    ]


@needs_libtpu
def test_cycles_of_products():
    one = Program(compile_on_one_chip(lambda x, w: jnp.tanh(x @ w), (1024, 1024), (1024, 1024)).as_text()).cycles()
    # 4 products of 128 x 128 a cycle at most, and no less than half of that.
    at_best = 1024**3 / (4 * 128 * 128)
    assert at_best <= one <= 2 * at_best

    def of_layers(count):
        return Program(compile_on_one_chip(_layers, (1024, 1024), (count, 1024, 1024)).as_text()).cycles()

    # Beside the product, a turn of the scan copies what it carries: more than 12 products, but not twice as much.
    assert 0.9 * 12 <= of_layers(12) / one <= 18
    np.testing.assert_allclose(of_layers(24) - of_layers(12), of_layers(12), rtol=0.05)


@needs_libtpu
@pytest.mark.parametrize(
    "name,topology", [("v4", "v4:2x2x1"), ("v5e", "v5e:1x1"), ("v5p", "v5p:2x2x1"), ("v6e", "v6e:1x1")]
)
def test_cycles_at_the_clock_are_below_the_peak(name, topology):
    size = 8192
    compiled = compile_on_one_chip(lambda x, y: x @ y, (size, size), (size, size), topology=topology)
    seconds = Program(compiled.as_text()).cycles() / CHIPS[name].clock_hz
    assert 0.6 < 2 * size**3 / seconds / CHIPS[name].peak_flops < 1.0


@needs_libtpu
def test_a_conditional_costs_its_longest_branch():
    def short(flag, x, w):
        return jnp.tanh(x @ w)

    def long(flag, x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def either(flag, x, w):
        return jax.lax.cond(flag[0] > 0, long, short, flag, x, w)

    shapes = ((8,), (1024, 1024), (1024, 1024))
    cycles = [Program(compile_on_one_chip(f, *shapes).as_text()).cycles() for f in (either, long)]
    np.testing.assert_allclose(*cycles, rtol=0.2)


@pytest.mark.parametrize("platform", PLATFORMS[:2])
def test_a_loop_that_depends_on_data(platform):
    def until(x):
        return jax.lax.while_loop(lambda c: c.sum() < 1e3, lambda c: jax.lax.psum(c + 1.0, "data"), x)

    mesh = mesh_of(platform)
    program = Program(compile_sharded(until, mesh, (8, 128)).as_text())
    assert len(program.data_dependent_loops()) == 1
    assert [(c.loops, c.executions) for c in program.collectives(mesh)] == [((None,), 1)]


def _upwards(x):
    return jax.lax.fori_loop(0, 6, lambda i, c: jax.lax.psum(jnp.sin(c), "data"), x)


def _downwards(x):
    turn = lambda state: (state[0] - 2, jax.lax.psum(jnp.sin(state[1]), "data"))  # noqa: E731
    return jax.lax.while_loop(lambda state: state[0] >= 0, turn, (9, x))[1]


def _limit_first(x):
    turn = lambda state: (3 + state[0], jax.lax.psum(jnp.sin(state[1]), "data"))  # noqa: E731
    return jax.lax.while_loop(lambda state: jax.lax.gt(9, state[0]), turn, (0, x))[1]


@pytest.mark.parametrize("body,turns", [(_upwards, 6), (_downwards, 5), (_limit_first, 3)])
@pytest.mark.parametrize("platform", PLATFORMS[:2])
def test_ways_to_count(platform, body, turns):
    mesh = mesh_of(platform)
    (found,) = collectives(compile_sharded(body, mesh, (8, 128)), mesh)
    assert found.loops == (turns,)


def test_groups_over_every_subset_of_axes():
    mesh = cpu_mesh()
    for axes in (("replica",), ("data",), ("model",), ("replica", "data"), ("data", "model"), ("replica", "model")):
        (found,) = collectives(compile_sharded(lambda x, axes=axes: jax.lax.psum(x, axes), mesh, (8, 128)), mesh)
        assert found.axes == axes


@pytest.mark.parametrize(
    "text,expected",
    [
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("channel_id=1, use_global_device_ids=true", ((0, 1, 2, 3),)),
    ],
)
def test_notations_of_groups(text, expected):
    assert groups.parse_groups(f"channel_id=3, {text}, dimensions={{0}}", 4) == expected


def test_what_is_not_a_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        Program("hello")
    with pytest.raises(ValueError, match="unknown notation"):
        groups.parse_groups("replica_groups=?!", 4)


@needs_libtpu
def test_computations_on_the_sparse_core():
    def looked_up(table, ids):
        return jnp.tanh(table.at[ids].get(mode="clip"))

    (device,) = tpu_devices("v6e:1x1")
    place = SingleDeviceSharding(device)
    table = jax.ShapeDtypeStruct((32768, 768), jnp.bfloat16, sharding=place)
    ids = jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=place)
    text = jax.jit(looked_up).lower(table, ids).compile().as_text()
    assert '}, execution_thread="sparsecore"' in text
    program = Program(text)
    names = [e.instruction.name for e in program.executed(fusions=True)]
    assert len(names) == len(set(names)) and program.cycles() > 0
    assert len(program.computations) == len(re.findall(r"^(?:ENTRY )?%.*\{$", text, re.MULTILINE))


@needs_libtpu
def test_collectives_on_the_sparse_core():
    """TPU7x gathers there while the other cores compute."""
    mesh = tpu_mesh((1, 8, 1), "tpu7x:2x2x1")

    def gathered(x):
        return jnp.tanh(jax.lax.all_gather(x, "data", tiled=True))

    compiled = compile_sharded(gathered, mesh, (1024, 512), in_spec=P("data"))
    assert "custom-call-start(" in compiled.as_text()
    (found,) = collectives(compiled, mesh)
    assert (found.kind, found.axes, found.network, found.bytes) == ("all-gather", ("data",), "ICI", 4 * 1024 * 512)


def test_an_instruction_without_an_estimate():
    """The compiler writes the largest integer where it has none: not a number of cycles."""

    def fusion(name, cycles):
        config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        return f"  {name} = f32[8] fusion(%x), kind=kLoop, calls=%inner, {config}"

    lines = ["HloModule m", "%inner (p: f32[8]) -> f32[8] {", "  ROOT %p = f32[8] parameter(0)", "}", ""]
    lines += ["ENTRY %main (x: f32[8]) -> f32[8] {", "  %x = f32[8] parameter(0)"]
    lines += [fusion("%known", 120), fusion("ROOT %unknown", 2**63 - 1), "}"]
    program = Program("\n".join(lines))
    assert program.cycles() == 120
    assert [e.instruction.name for e in program.unestimated()] == ["unknown"]
