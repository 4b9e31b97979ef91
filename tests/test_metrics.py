"""Sums become T5X's metrics; the writer never loses a line or poisons one."""

import json
import math

import pytest

from perex_t5x.errors import TrainingError
from perex_t5x.metrics import MetricSums, MetricsWriter, model_flops_utilization
from perex_t5x.models import DecoderOnlyModel

STEP = {"loss": 8.0, "z_loss": 2.0, "correct": 3.0, "weights": 4.0, "tokens": 4.0, "all_tokens": 8.0, "examples": 2.0}


T5X_NAMES = {
    "accuracy",
    "loss",
    "cross_ent_loss",
    "z_loss",
    "loss_per_nonpadding_target_token",
    "loss_per_all_target_tokens",
    "cross_ent_loss_per_all_target_tokens",
    "z_loss_per_all_target_tokens",
    "nonpadding_fraction",
}
T5X_TIMING = {
    "timing/seconds",
    "timing/seqs",
    "timing/seqs_per_second",
    "timing/seqs_per_second_per_core",
    "timing/steps_per_second",
    "timing/target_tokens_per_second",
    "timing/target_tokens_per_second_per_core",
}


def test_summary_by_hand():
    sums = MetricSums(DecoderOnlyModel(None, None, None))
    sums.add(STEP, objective=2.0)  # normalised by 4 tokens
    sums.add({k: 2 * v for k, v in STEP.items()}, objective=2.0)
    summary = sums.summary()
    assert summary["accuracy"] == pytest.approx(9 / 12)
    assert summary["loss"] == pytest.approx(2.0)
    assert summary["cross_ent_loss"] == pytest.approx(1.5)
    assert summary["z_loss"] == pytest.approx(0.5)
    assert summary["loss_per_nonpadding_target_token"] == pytest.approx(24 / 12)
    assert summary["nonpadding_fraction"] == pytest.approx(0.5)
    timing = sums.timing(seconds=2.0, devices=4)
    assert timing["timing/steps_per_second"] == 1.0
    assert timing["timing/seqs_per_second"] == 3.0
    assert timing["timing/target_tokens_per_second"] == 12.0
    assert timing["timing/seqs_per_second_per_core"] == 0.75
    assert set(summary) == T5X_NAMES and set(timing) == T5X_TIMING
    assert sums.speed(seconds=2.0) == {"tokens/s": 12.0}


def test_a_model_without_metrics_of_its_own():
    sums = MetricSums(object())
    sums.add({"accuracy": 3.0, "examples": 4.0, "non_finite_examples": 0.0}, objective=2.0)
    sums.add({"accuracy": 1.0, "examples": 4.0, "non_finite_examples": 1.0}, objective=1.0)
    assert sums.summary() == {"loss": 1.5, "accuracy": 0.5}
    timing = sums.timing(seconds=2.0, devices=4)
    assert timing["timing/seqs_per_second"] == 4.0 and not any("token" in name for name in timing)
    assert sums.speed(2.0) == {"examples/s": 4.0}


def test_no_steps_no_summary():
    assert MetricSums(None).summary() == {}


def test_utilisation_only_where_the_peak_is_known():
    assert model_flops_utilization(1e12, 1.0, "cpu", 1) == {}
    assert model_flops_utilization(275e12, 1.0, "TPU v4", 2)["timing/model_flops_utilization"] == pytest.approx(0.5)


def test_writer_lines_and_forgetting(tmp_path):
    writer = MetricsWriter(str(tmp_path))
    for step in (1, 2, 3):
        writer.write("train", step, {"loss": step / 2, "bad": math.nan})
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 2, "na')  # killed while writing
    writer.forget_after(2)
    rows = [json.loads(line) for line in open(tmp_path / "metrics.jsonl", encoding="utf-8")]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] == 1.0 and rows[1]["bad"] == "nan"
    writer.close()
    assert any("tfevents" in p.name for p in (tmp_path / "train").iterdir())


def test_other_processes_write_nothing(tmp_path):
    writer = MetricsWriter(str(tmp_path), enabled=False)
    writer.write("train", 1, {"loss": 1.0})
    writer.forget_after(0)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_unwritable_metrics_are_explained(tmp_path):
    writer = MetricsWriter(str(tmp_path))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match="cannot write metrics to .*last checkpoint"):
        writer.write("train", 1, {"loss": 1.0})
