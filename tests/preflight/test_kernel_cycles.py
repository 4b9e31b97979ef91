"""Cycles of Pallas kernels: read from schedules of known content, and of kernels that the TPU compiler has scheduled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from perex_t5x.hardware.chips import chip
from perex_t5x.hardware.devices import tpu_devices
from perex_t5x.hardware.hlo.program import Program
from perex_t5x.per_example.kernels import matmul, tiles
from perex_t5x.preflight import account, breakdown, kernel_cycles, step
from perex_t5x.preflight.kernel_cycles import Kernel, kernel_of, parse_schedule
from perex_t5x.preflight.report_cache import ReportCache
from tests import tiny
from tests.preflight.support import compile_on_one_chip, needs_libtpu

# --- a schedule in the compiler's notation ----------------------------------------------------------------------------


def schedule(parts=(100, 40), inner=200, turns=3, steps=8):
    """A grid of `steps` around: conditional parts of these lengths, and a loop of `turns` over `inner` bundles."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    at = 0

    def bundle(text="", comment="", label="  ", depth=1):
        nonlocal at
        lines.append(f"{hex(at):>6} {label}: {'>' * depth} {{ {text} }}{f' /* {comment} */' if comment else ''}")
        at += 1

    window = "The window shape is bf16[1,16,128], while the full shape is bf16[4,32,128]."
    bundle(f"%s1 = hbm /* input window allocation. {window} */", depth=0)
    bundle(comment="Start region 1", label="LB")
    bundle("sbr.rel (%p1) target = $region9")
    for _ in range(4):
        bundle()
    for k, length in enumerate(parts):
        bundle(f"sbr.rel (!%p2_{k}) target = $region2{k}")
        for _ in range(4 + length):
            bundle()
        bundle(comment=f"Start/End empty region 2{k}", label="PF")
    bundle(f"%p3 = scmp.ge.s32.totalorder %s3, {turns} /* loop exit test */", "Start region 3", "LB", 2)
    for _ in range(inner - 6):
        bundle(depth=2)
    bundle("sbr.rel (!%p3) target = $region3", depth=2)
    for _ in range(4):
        bundle(depth=2)
    bundle(f"%p4 = scmp.ge.s32.totalorder %s4, {steps + 2} /* loop exit test */", "Start/End empty region 9")
    bundle("sbr.rel (!%p4) target = $region1", depth=0)
    for _ in range(4):
        bundle()
    return "\n".join(lines)


def test_bundles_count_as_often_as_they_run():
    found = parse_schedule(schedule())
    assert [turns for _, _, turns in found.loops] == [10, 3]
    assert len(found.parts) == 1 and found.parts[0][1] - found.parts[0][0] + 1 == 100  # 40 are not worth a question
    assert kernel_cycles.chunks_of(found) == (4, 2)
    around = 1 + 10 * (6 + 6)  # the first bundle; each turn of the grid's loop, also those in which the body rests
    body = 8 * (6 + 100 + 6 + 40 + 3 * 200 - 1)
    assert abs(found.cycles() - around - body) <= 2 * 10
    assert found.cycles() - found.cycles([0.25]) == 8 * 100 * 0.75


def test_a_schedule_without_loops():
    text = "\n".join(f"{hex(i):>6}   :  {{ nop }}" for i in range(17))
    assert parse_schedule(text).cycles() == 17


def test_blocks_that_a_mask_skips_are_not_counted():
    """Of three parts the widest computes a block, the others begin and end a row."""
    text = schedule(parts=(100, 400, 80))
    kernel = Kernel("splash_mha_fwd_residuals", (), (), "{}", (), 0, 0)
    masked = dataclasses.replace(kernel, shares=(0.75, 0.5))
    skipped = 8 * (0.25 * 400 + 0.5 * (100 + 80))
    assert kernel_cycles.schedule_cycles(kernel, text) - kernel_cycles.schedule_cycles(masked, text) == skipped
    assert kernel.key != masked.key


# --- kernels of compiled programs -------------------------------------------------------------------------------------


def plain_sum(kind):
    """Σ_n S_nᵀ R_n by the kernel."""

    def run(s, r):
        tile = tiles.choose(s.shape[2], r.shape[2], s.shape[1], 2, 1, False, kind)
        add = lambda sums, g, weight, scale: [sums[0] + g]  # noqa: E731
        return matmul.sums_of_products(
            s, r, None, None, None, finish=lambda g: g, add=add, num_sums=1, norms=False, tile=tile
        )[0]

    return run


@needs_libtpu
@pytest.mark.parametrize(
    "name", ["v5e", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v5p", "v6e", "tpu7x"))]
)
def test_a_product_written_both_ways(name, tmp_path):
    """docs/preflight.md states the factor."""
    topology_name = chip(name).smallest_topology
    shapes = (8, 1024, 1024), (8, 1024, 2048)
    by_xla = compile_on_one_chip(lambda s, r: jnp.einsum("nti,ntj->ij", s, r), *shapes, topology=topology_name)
    by_kernel = compile_on_one_chip(plain_sum(chip(name).device_kinds[0]), *shapes, topology=topology_name)
    program = Program(by_kernel.as_text())
    counted = kernel_cycles.kernel_cycles(program, chip(name), ReportCache(tmp_path))
    assert list(counted) == [e.instruction.name for e in program.unestimated()] and len(counted) == 1
    ratio = program.cycles(counted) / Program(by_xla.as_text()).cycles()
    assert 0.8 < ratio < 1.25, ratio
    assert len(list(tmp_path.iterdir())) == 1
    apart = pytest.MonkeyPatch()
    with apart.context() as patch:
        patch.setattr(kernel_cycles, "_compile_apart", None)  # not needed again
        assert kernel_cycles.kernel_cycles(program, chip(name), ReportCache(tmp_path)) == counted


@needs_libtpu
def test_a_kernel_is_read_from_the_program():
    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def run(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        cost = pl.CostEstimate(flops=7, bytes_accessed=11, transcendentals=0)
        return pl.pallas_call(double, out_shape=shape, input_output_aliases={0: 0}, name="twice", cost_estimate=cost)(x)

    program = Program(compile_on_one_chip(run, (16, 256)).as_text())
    (instruction,) = [e.instruction for e in program.executed() if e.instruction.is_kernel]
    kernel = kernel_of(instruction)
    assert (kernel.name, kernel.operands, kernel.results) == ("twice", (("bf16", (16, 256)),), (("bf16", (16, 256)),))
    assert (kernel.aliases, kernel.flops, kernel.bytes) == (((0, 0),), 7, 11)
    assert Kernel.from_json(kernel.to_json()) == kernel
    # What cannot be compiled apart is not counted, and is said not to be.
    impossible = dataclasses.replace(chip("v5e"), shapes=("9x9",))
    assert kernel_cycles.kernel_cycles(program, impossible) == {}
    assert [e.instruction.name for e in program.unestimated()] == [instruction.name]


@needs_libtpu
def test_where_a_program_has_its_arrays_does_not_matter(tmp_path):
    """On TPU7x a kernel in a program names the memories of its operands and results; alone it has others."""

    def plus(start_ref, x_ref, y_ref):
        y_ref[...] = x_ref[...] + start_ref[0]

    def run(x):
        start = jnp.sum(x).astype(jnp.int32).reshape(1)
        in_specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)]
        shape = jax.ShapeDtypeStruct(x.shape, jnp.int32)
        call = pl.pallas_call(plus, out_shape=shape, in_specs=in_specs, name="plus")
        return jnp.sum(jnp.sin(call(start, jnp.round(100 * x).astype(jnp.int32)).astype(jnp.float32)))

    tpu7x = chip("tpu7x")
    program = Program(compile_on_one_chip(run, (16, 256), topology=tpu7x.smallest_topology).as_text())
    (kernel,) = [e.instruction for e in program.executed() if e.instruction.is_kernel]
    assert '"color":"1"' in kernel.attributes, "the case is not there"
    assert kernel_cycles.kernel_cycles(program, tpu7x, ReportCache(tmp_path))[kernel.name] > 0


@needs_libtpu
def test_splash_attention_counts_the_blocks_that_its_mask_leaves():
    """Also where the mask is a constant outside the loop over layers, and elided in the text."""
    length, block = 1024, 256

    def run(mask, fused):
        sizes = splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=None if fused else block,
            block_kv_dq=None if fused else block,
            use_fused_bwd_kernel=fused,
        )
        heads = splash_attention_mask.MultiHeadMask([mask])

        def layers(qkv_3xNxHxTxD):
            attend = splash_attention_kernel.make_splash_mha(heads, block_sizes=sizes, head_shards=1, q_seq_shards=1)
            layer = jax.grad(lambda qkv: jnp.sum(jax.vmap(attend)(*qkv).astype(jnp.float32)))
            return jax.lax.fori_loop(0, 3, lambda _, qkv: layer(qkv), qkv_3xNxHxTxD)

        return compile_on_one_chip(layers, (3, 2, 1, length, 128))

    def shares(text):
        program = Program(text)
        kernels = [e for e in program.executed() if e.instruction.is_kernel]
        return [kernel_cycles.mask_shares(program, e) for e in kernels]

    causal = run(splash_attention_mask.CausalMask((length, length)), fused=False)
    assert shares(step.program_text(causal)) == [(10 / 16, 1 / 4)] * 3
    assert "constant({...})" in causal.as_text() and shares(causal.as_text()) == [(10 / 16, 1 / 4)] * 3
    local = splash_attention_mask.LocalMask((length, length), (block, 0), 0)
    (forward, backward) = shares(step.program_text(run(local, fused=True)))
    # Of each row of blocks at most two are needed: the grid of the forward kernel has no others, the fused one's has.
    assert forward == (7 / 8, 1 / 2) and backward == (7 / 16, 1 / 4)


SIZES = [
    "models.T5Config.vocab_size = 512",
    "models.T5Config.emb_dim = 256",
    "models.T5Config.num_heads = 2",
    "models.T5Config.head_dim = 128",
    "models.T5Config.mlp_dim = 512",
    "models.T5Config.scan_layers = True",
    "models.T5Config.dtype = 'bfloat16'",
    "models.T5Config.logits_via_embedding = False",
    "TASK_FEATURE_LENGTHS = {'targets': 128}",
    "BATCH_SIZE = 8",
]


@needs_libtpu
@pytest.mark.parametrize("on", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_are_in_the_step_that_preflight_compiles(on):
    """On a machine whose default backend is the CPU."""
    files = ["models/tiny.gin", "runs/pretrain.gin", "optimizers/micro_adam.gin", "meshes/dp.gin"]
    bindings = [b for b in tiny.BINDINGS if "TASK" not in b and "T5Config" not in b and "BATCH_SIZE" not in b]
    trainer, spec = step.build(files, [*bindings, *SIZES, f"trainer.Trainer.kernels = {on}"], tpu_devices("v5e:2x2"))
    assert jax.default_backend() == "cpu"
    text = step.compile_step(trainer, spec).as_text()
    assert (matmul.NAME in text) == on
    program, seven = Program(text), 7  # of the kernels, to find them again
    kernels = {e.instruction.name: seven for e in program.executed() if e.instruction.is_kernel}
    parts = {part.name: part for part in breakdown.breakdown(program, chip("v5e"), kernels)}
    assert sum(part.cycles for part in parts.values()) == program.cycles(kernels)
    known = {"attention", "projections", "MLP", "head and loss", "embedding", "norms and rotary", "optimizer"}
    assert known | {breakdown.STATISTICS} <= parts.keys()
    assert parts["other"].cycles < 0.1 * program.cycles(kernels)
    assert 0 < sum(part.bound for part in parts.values()) < program.cycles(kernels)
    said = {f.parameter: f.kernel for f in account.reductions_of_step(trainer, spec)}
    assert said["decoder/layers/mlp/wo/kernel"] == ("" if on else "kernels are turned off")
    assert said["decoder/decoder_norm/scale"] is None
