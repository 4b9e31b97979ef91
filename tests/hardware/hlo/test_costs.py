"""Products and bytes of instructions, in programs of known content."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from perex_t5x.hardware.chips import chip
from perex_t5x.hardware.hlo.costs import kernel_cost, memory_bytes, product_flops, stated_cycles
from perex_t5x.hardware.hlo.program import Program
from tests.preflight.support import compile_on_one_chip, needs_libtpu

TEXT = """HloModule m, num_partitions=1

%sliced (p0: f32[20,8,128], p1: s32[], p2: f32[8,128], p3: f32[20,8,128]) -> (f32[8,128], f32[20,8,128]) {
  %p0 = f32[20,8,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %p2 = f32[8,128]{1,0:T(8,128)} parameter(2)
  %p3 = f32[20,8,128]{2,1,0:T(8,128)} parameter(3)
  %zero = s32[] constant(0)
  %part = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,128}
  %flat = f32[8,128]{1,0:T(8,128)} bitcast(%part)
  %sum = f32[8,128]{1,0:T(8,128)} add(%flat, %p2)
  %row = f32[1,8,128]{2,1,0:T(8,128)} bitcast(%sum)
  %kept = f32[20,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%p3, %row, %p1, %zero, %zero)
  ROOT %both = (f32[8,128]{1,0:T(8,128)}, f32[20,8,128]{2,1,0:T(8,128)}) tuple(%sum, %kept)
}

ENTRY %main (a: f32[20,8,128], i: s32[], x: f32[8,128], b: f32[20,8,128]) -> f32[8,128] {
  %a = f32[20,8,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %x = f32[8,128]{1,0:T(8,128)S(1)} parameter(2)
  %b = f32[20,8,128]{2,1,0:T(8,128)} parameter(3)
  %f = (f32[8,128]{1,0:T(8,128)S(1)}, f32[20,8,128]{2,1,0:T(8,128)}) fusion(%a, %i, %x, %b), kind=kLoop, calls=%sliced
  %got = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%f), index=0
  %all = f32[20,8,128]{2,1,0:T(8,128)} get-tuple-element(%f), index=1
  ROOT %copy = f32[20,8,128]{2,1,0:T(8,128)} copy(%all)
}
"""


def cost(function, program, name):
    (e,) = [e for e in program.executed() if e.instruction.name == name]
    return function(program.computations, e.instruction, e.frame.computation)


def test_slices_and_what_stays_on_the_chip():
    program, row = Program(TEXT), 4 * 8 * 128
    # One row of `a` is read, one of `b` written; `x` and the sum are in the chip's own memory.
    assert cost(memory_bytes, program, "f") == row + 4 + row
    assert cost(memory_bytes, program, "copy") == 2 * 20 * row
    assert cost(product_flops, program, "f") == 0


def total(function, text):
    program = Program(text)
    return sum(
        function(program.computations, e.instruction, e.frame.computation) * e.executions for e in program.executed()
    )


@needs_libtpu
@pytest.mark.parametrize(
    ("subscripts", "shapes", "products"),
    [
        ("td,df->tf", [(1024, 256), (256, 512)], 1024 * 256 * 512),
        ("nthd,nshd->nhts", [(2, 256, 4, 128), (2, 256, 4, 128)], 2 * 4 * 256 * 256 * 128),
        ("ntd,ntf->df", [(4, 256, 128), (4, 256, 256)], 4 * 256 * 128 * 256),
    ],
)
def test_products_as_the_compiler_writes_them(subscripts, shapes, products):
    """As convolutions, those with an axis of their own over padded and dilated windows."""
    compiled = compile_on_one_chip(lambda *xs: jnp.einsum(subscripts, *xs), *shapes)
    assert total(product_flops, compiled.as_text()) == 2 * products


@needs_libtpu
def test_kernels_count_by_what_they_state():
    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def run(x):
        cost = pl.CostEstimate(flops=10**9, bytes_accessed=10**3, transcendentals=0)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=shape, cost_estimate=cost)(jnp.sin(x))

    program, v5e = Program(compile_on_one_chip(run, (16, 256)).as_text()), chip("v5e")
    (kernel,) = [e.instruction for e in program.executed() if e.instruction.is_kernel]
    assert kernel_cost(kernel) == (10**9, 10**3)
    at_peak = round(10**9 / v5e.peak_flops * v5e.clock_hz)
    assert stated_cycles(program, v5e) == program.cycles() + at_peak > at_peak
