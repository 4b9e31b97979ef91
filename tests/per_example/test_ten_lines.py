"""docs/ten_lines.md and docs/per_example.md: their blocks run one after the other, and do what they say."""

import pathlib
import re

import jax
import numpy as np
import optax

from tests.per_example.loop_reference import norms, single_gradients

ROOT = pathlib.Path(__file__).parents[2]


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)


BLOCKS = blocks_of("ten_lines.md")


def test_the_blocks_run(capsys):
    names, seen = {}, []
    for code in BLOCKS:
        exec(code, names)
        seen.append(dict(names))
    loss_fn, start, batch = (names[name] for name in ("loss_fn", "start", "batch"))
    before = loss_fn(start, batch)
    assert [float(s["loss"]) < 0.5 * float(before) for s in seen if "loss" in s] == [True] * (len(BLOCKS) - 2)

    # The step is the plain one: same parameters after as many steps of the loop that the reader had.
    optimizer, params = optax.adam(0.03), start
    state = optimizer.init(params)

    @jax.jit
    def plain_step(params, state):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(50):
        params, state = plain_step(params, state)
    trained = next(s for s in seen if "loss" in s)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), trained["params"], params)

    # What is said of examples is true of the loop's gradients.
    gradients = single_gradients(loss_fn, names["params"], batch)
    signs = np.abs(np.mean([np.sign(g["w"]) for g in gradients], axis=0))
    np.testing.assert_allclose(names["share"], signs, atol=1e-6)
    hardest = next(s for s in seen if "hardest" in s)
    assert hardest["aux"].norms[hardest["hardest"]] == max(hardest["aux"].norms) > 0
    clipped = next(s for s in seen if "clipped" in s)
    of_loop = single_gradients(loss_fn, clipped["params"], batch)
    factors = [min(1.0, 0.1 / n) for n in norms(of_loop)]
    expected = np.mean([f * g["w"] for f, g in zip(factors, of_loop, strict=True)], axis=0)
    np.testing.assert_allclose(clipped["stats"].mean["w"], expected, rtol=1e-4, atol=1e-7)
    assert "reduction" in capsys.readouterr().out


def test_ten_lines_are_ten():
    (block,) = (code for code in BLOCKS if "was: loss, grads" in code)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


def test_the_blocks_of_the_manual_run():
    names, last = {}, {}
    for code in blocks_of("per_example.md"):
        if "model." in code:  # one of this project's models, which this test does without
            continue
        exec(code, names)
        last[code] = dict(names)
    (sensitivity,) = (n["stats"].sensitivity for code, n in last.items() if "stats.sensitivity.mean" in code)
    assert (sensitivity.sum, sensitivity.mean) == (0.5, 0.5 / 16)
    on_mesh = [n["stats"] for code, n in last.items() if "mesh=mesh" in code or "make_mesh" in code]
    alone, _ = names["per_example"].grad_statistics(names["loss_fn"])(names["params"], names["batch"])
    for stats in on_mesh:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), stats.mean, alone.mean)
    # Of sharded arrays, too.
    given = names["loss_fn"], names["params"], names["spread"]
    assert {row.reduction for row in names["per_example"].coverage(*given)} == {"factored"}
    names["check_independent"](*given)
