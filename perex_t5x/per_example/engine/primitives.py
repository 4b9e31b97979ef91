"""What the engine knows of JAX's primitives: every set of primitive names, and what membership means.

A primitive that is in no set is not wrong, only unknown: a gradient that comes out of it is materialised for all examples,
and its axes of size one stay. Adding a name here is a claim about mathematics (or, where it says so, about a compiler), and
needs a case in `tests/per_example/engine/test_random_graphs.py` or beside the module that uses the set.
"""

from __future__ import annotations

import operator

# --- calls and control flow -------------------------------------------------------------------------------------------

# Calls whose body is simply run (name -> the parameter that holds it): the program is already differentiated, so custom
# derivative rules have done their work, and what `jit` would compile separately is compiled with the rest.
INLINED_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

# A rematerialised region, under the names it has had. Not inlined like other calls: its inputs may need a barrier.
REMAT = {"remat2", "checkpoint", "remat"}

# --- the tail of a gradient: from its producer to the program's result ------------------------------------------------

# Move elements and change none, so they commute with "apply φ, then sum over examples".
PERMUTATIONS = {"transpose", "reshape", "squeeze", "rev", "copy", "copy_p"}

# Elementwise functions of one array that can be absorbed into φ. Linear, too: some reductions learn the factor from f(1).
UNARY = {"convert_element_type", "neg"}

# Sums of two arrays. φ does not commute with them; both summands must be known before φ is applied.
ADDITIONS = {"add", "add_any"}

# Equations that a producer may end in: they make a gradient of the parameter's size from smaller values.
CONTRACTIONS = {
    "dot_general", "conv_general_dilated", "scatter-add", "reduce_sum", "cumsum", "select_and_scatter_add",
    "reduce_window_sum", "segment_sum", "psum", "psum_invariant",
}  # fmt: skip

# Equations that a producer may contain besides: cheap to repeat for one example at a time, and no larger in than out.
CHEAP = {
    "add", "add_any", "sub", "mul", "div", "neg", "select_n", "pad", "slice", "concatenate", "broadcast_in_dim",
    "dynamic_slice", "dynamic_update_slice", "convert_element_type", "transpose", "reshape", "squeeze", "rev", "copy",
    "copy_p", "reduce_precision", "integer_pow", "square", "pvary",
}  # fmt: skip

# Linear in all of their operands together: they may combine gradients of what is computed from parameters alone, on the way
# to the parameters (`engine.cones`).
LINEAR_TOGETHER = {
    "add", "add_any", "sub", "concatenate", "pad", "select_n", "scatter", "scatter-add", "dynamic_update_slice",
    "optimization_barrier",
}  # fmt: skip

# --- devices ----------------------------------------------------------------------------------------------------------

# Sums over devices that may stand at the end of a gradient: linear, and acting on each element separately, so they may
# come after φ and after each device's own sum.
CROSS_DEVICE_SUMS = {"psum", "psum_invariant", "reduce_scatter"}

# Name a mesh axis but move nothing between devices.
LOCAL_TO_DEVICE = {"axis_index", "pvary", "pcast"}

# Say on which devices a value lies, and change nothing of it.
CONSTRAINTS = {"sharding_constraint"}

# --- rewrites ---------------------------------------------------------------------------------------------------------

# Elementwise operations with a scalar, or with a value that examples share, that can move into the loop or remat region
# before them.
MOVED_INTO_BODY = {
    "mul": operator.mul,
    "div": operator.truediv,
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
}

# f(0) = 0, elementwise: zeros that padding put in are still zeros after them.
ZERO_PRESERVING = {"convert_element_type", "neg", "reduce_precision", "copy"}

# Elementwise, so they may be applied to values without axes of size one, where all operands have the same shape.
ELEMENTWISE = {
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "erf",
    "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "name", "ne", "neg", "not", "optimization_barrier", "or", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip

# Reduce over the axes in `params["axes"]`; an axis of size one may be left out of them.
AXIS_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}

SCATTERS = {"scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"}

# --- kernels ----------------------------------------------------------------------------------------------------------

# Elementwise, and known to compile inside a Pallas TPU kernel (tested with the TPU compiler): what φ may consist of there.
KERNEL_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "clamp", "convert_element_type", "copy", "div", "eq", "exp", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rsqrt",
    "select_n", "sign", "sqrt", "square", "stop_gradient", "sub", "tanh",
}  # fmt: skip

# --- `check_independent` ----------------------------------------------------------------------------------------------

# What a sum over examples may pass through on its way to the loss: linear, or moving elements.
LINEAR = {
    "add", "add_any", "sub", "neg", "reduce_sum", "convert_element_type", "reshape", "squeeze", "transpose", "copy",
    "copy_p", "broadcast_in_dim", "slice", "concatenate", "pad", "expand_dims", "reduce_precision", "stop_gradient",
}  # fmt: skip

# Linear in one operand, as long as the other does not depend on examples.
LINEAR_BY_SHARED = {"mul", "div", "dot_general", "select_n"}
