"""Benchmarks: what takes turns, and that both programs measure and print JSON."""

import json

import gin
import pytest

from perex_t5x import bench, bench_engine
from perex_t5x.errors import ConfigError
from tests import tiny


def test_turns_alternate():
    order = []
    times = bench.in_turns({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, rounds=3)
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


def test_the_engine_beside_its_alternatives(capsys):
    (result,) = bench_engine.benchmark_engine(["mlp"], rounds=2, microbatches=["4", "7"], examples=2, layers=2)
    out, summary = capsys.readouterr()
    assert json.loads(out) == result and "surgery" in summary
    rows = result["programs"]
    assert list(rows) == ["plain", "loop", "vmap", "micro_grad", "surgery", "clipped", "two passes"]
    assert rows["plain"]["time_all_at_once"] == rows["plain"]["time_at_best"] == rows["plain"]["temp_at_best"] == 1
    assert all(row["best_microbatch"] in (None, 4) for row in rows.values())  # 7 does not divide 16
    with pytest.raises(ConfigError, match="--engine=scaned: .* Did you mean 'scanned'"):
        bench_engine.benchmark_engine(["scaned"])
