"""Benchmarks: what takes turns, and that both programs measure and print JSON."""

import json

import gin
import jax
import numpy as np
import pytest

from perex_t5x import bench, zoo
from perex_t5x.bench import engine
from perex_t5x.bench import zoo as bench_zoo
from perex_t5x.bench.turns import in_turns
from perex_t5x.errors import ConfigError
from tests import tiny


def test_turns_alternate():
    order = []
    times = in_turns({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, rounds=3)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert times == {"a": [2, 3, 6], "b": [1, 4, 5]}


def test_the_training_loop_beside_a_bare_one(capsys, tmp_path):
    files = ("models/tiny.gin", "runs/bench.gin")
    small = ("models.T5Config.num_decoder_layers = 1", "STEPS = 2", "ROUNDS = 2", "BATCH_SIZE = 8")
    small += (f"MODEL_DIR = '{tmp_path}/there'", "SAVE_PERIOD = 1")
    tiny.configure(*small, files=files)
    result = gin.get_configurable(bench.benchmark)()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert result["name"] == "tiny" and result["batch_size"] == 8 and result["length"] == 16
    assert len(result["step_seconds_all"]) == len(result["bare_step_seconds_all"]) == 2
    assert result["framework_overhead"] == result["step_seconds"] / result["bare_step_seconds"] - 1
    first, second = (a / b for a, b in zip(result["storage_step_seconds_all"], result["step_seconds_all"], strict=True))
    assert result["storage_overhead"] == pytest.approx((first + second) / 2 - 1) and not list(
        (tmp_path / "there").iterdir()
    )
    assert result["saving_overhead"] == pytest.approx(sum(result["saving_overhead_all"]) / 2)
    assert result["checkpoint_bytes"] > 1000 and len(result["saving_overhead_all"]) == 2
    assert result["tokens_per_second"] == pytest.approx(8 * 16 * result["steps_per_second"])


@pytest.mark.slow
def test_the_engine_beside_its_alternatives(capsys):
    (result,) = engine.benchmark_engine(["mlp"], rounds=2, microbatches=["4", "7"], examples=2, layers=2)
    out, summary = capsys.readouterr()
    assert json.loads(out) == result and "surgery" in summary
    rows = result["programs"]
    assert list(rows) == ["plain", "loop", "vmap", "micro_grad", "surgery", "clipped", "two passes"]
    assert rows["plain"]["time_all_at_once"] == rows["plain"]["time_at_best"] == rows["plain"]["temp_at_best"] == 1
    assert all(row["best_microbatch"] in (None, 4) for row in rows.values())  # 7 does not divide 16
    with pytest.raises(ConfigError, match="--engine=scaned: .* Did you mean 'scanned'"):
        engine.benchmark_engine(["scaned"])


def test_losses_of_the_zoo(capsys, tmp_path):
    rows = bench_zoo.benchmark_zoo(
        ["dropout", "experts_ragged", "weight_t?nh"], rounds=1, table_file=str(tmp_path / "zoo.md"), large=False
    )
    out, summary = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == rows
    assert [row["name"] for row in rows] == ["experts_ragged", "dropout", "weight_tanh"]
    ragged, *others = rows
    assert ragged["seconds"].keys() == {"plain", "map", "vmap", "micro_grad 4", "micro_grad 1"}
    assert ragged["seconds"]["vmap"] is None and ragged["seconds"]["map"] > 0  # JAX cannot batch ragged_dot
    for row in others:
        assert row["seconds"].keys() == row["temp_bytes"].keys() and len(row["seconds"]) == 8
    text = (tmp_path / "zoo.md").read_text()
    assert summary.strip() in text and "--zoo=dropout,experts_ragged,weight_t?nh --rounds=1" in text
    with pytest.raises(ConfigError, match="--zoo=weigth_tanh: no loss of this name. Did you mean 'weight_tanh'"):
        bench_zoo.chosen(["weigth_tanh"])


def test_programs_of_the_zoo_compute_the_same():
    """Else their times could not be compared: mean and mean square, also where each example has a key."""
    case = zoo.make("variational_autoencoder")
    results = {name: p(case.params, case.batch) for name, p in bench_zoo.programs(case).items() if name != "plain"}
    ours, _ = results.pop("surgery")
    _, *of_vmap = results.pop("vmap")
    for name, result in results.items():
        moments = result[0] if "micro" in name else (result[0].mean, result[0].mean_square)
        assert_close(moments, (ours.mean, ours.mean_square))
    assert_close(tuple(of_vmap), (ours.mean, ours.mean_square))


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)
