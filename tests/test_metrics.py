"""Sums become T5X's metrics; the writer never loses a line or poisons one."""

import json
import math
import os

import pytest

from perex_t5x import metric_files
from perex_t5x.errors import Reason, TrainingError
from perex_t5x.metrics import MetricSums, MetricsWriter, model_flops_utilization, read_rows
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
    writer.flush()
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 2, "na')  # killed while writing
    assert writer.forget_after(2) == 3
    rows = [json.loads(line) for line in open(tmp_path / "metrics.jsonl", encoding="utf-8")]
    assert read_rows(tmp_path) == rows
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] == 1.0 and rows[1]["bad"] == "nan"
    writer.close()
    assert any("tfevents" in p.name for p in (tmp_path / "train").iterdir())


ODD = ["5", "[]", "{}", '{"step": true}', '{"step": "x"}', '{"step": NaN}', '{"step": 1e999}', f'{{"step": 1{"0" * 400}}}',
       '{"step": 1, "name": 2}', "[" * 100_000, "\x00\x01", "\u2028", "9" * 5000]  # fmt: skip


def test_lines_that_are_none_of_ours_are_dropped(tmp_path, caplog):
    good = '{"step": 1, "name": "train", "loss": 2.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + "\n".join([good, *ODD, good]).encode())
    assert [row["loss"] for row in read_rows(tmp_path)] == [2.5, 2.5]
    assert metric_files.forget_after(tmp_path, 1) == 1
    assert (tmp_path / "metrics.jsonl").read_text() == good * 2 and "are not as they were written" in caplog.text
    assert b"\xff\xfe" in (tmp_path / "metrics.jsonl.damaged").read_bytes()


def test_a_line_that_has_changed_is_no_measurement(tmp_path, caplog):
    writer = MetricsWriter(str(tmp_path))
    for step in (1, 2, 3):
        writer.write("train", step, {"loss": step / 2})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 1.0', '"loss": 1.4'))  # one bit
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 3] and "1 lines have changed" in caplog.text
    caplog.clear()
    assert metric_files.forget_after(tmp_path, 3) == 3 and "1 lines are not as they were written" in caplog.text
    assert '"loss": 1.4' in (tmp_path / "metrics.jsonl.damaged").read_text() and "1.4" not in path.read_text()
    # What is written from here on is checked, too, and a folder of an earlier version from its first resume on.
    for step, before in ((4, "1.5"), (5, "0.5")):
        writer = MetricsWriter(str(tmp_path))
        writer.write("train", step, {"loss": float(step)})
        writer.close()
        path.write_text(path.read_text().replace(f'"loss": {before}', '"loss": 7.5'))
        assert [row["loss"] for row in read_rows(tmp_path)][-1] == step and 7.5 not in [
            r["loss"] for r in read_rows(tmp_path)
        ]
        metric_files.forget_after(tmp_path, step)
        (tmp_path / "metrics.crc32c").unlink()
        metric_files.forget_after(tmp_path, step)


def test_no_line_is_lost_where_a_write_was_cut_off(tmp_path, monkeypatch):
    """Checksums are written first: lines that are there have theirs."""
    writer = MetricsWriter(str(tmp_path))
    writer.write("train", 1, {"loss": 1.0})
    writer.flush()
    with open(tmp_path / "metrics.crc32c", "a", encoding="utf-8") as f:
        f.write("0badcafe\n01ab")
    assert [row["step"] for row in read_rows(tmp_path)] == [1]
    writer.forget_after(1)
    writer.write("train", 2, {"loss": 1.0})
    writer.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]
    os.truncate(tmp_path / "metrics.crc32c", 5)  # itself damaged: it says nothing about the lines
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]


def test_a_folder_in_the_place_of_the_metrics(tmp_path):
    (tmp_path / "metrics.jsonl" / "x").mkdir(parents=True)
    assert read_rows(tmp_path) == [] and metric_files.newest_text(tmp_path) == ""
    writer = MetricsWriter(str(tmp_path))
    assert writer.forget_after(3) == 3
    writer.write("train", 4, {"loss": 1.0})
    writer.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [4] and (tmp_path / "metrics.jsonl.damaged" / "x").is_dir()


def test_other_processes_write_nothing(tmp_path):
    writer = MetricsWriter(str(tmp_path), enabled=False)
    writer.write("train", 1, {"loss": 1.0})
    writer.forget_after(0)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_unwritable_metrics_are_explained(tmp_path):
    writer = MetricsWriter(str(tmp_path))
    (tmp_path / "metrics.jsonl").mkdir()
    writer.write("train", 1, {"loss": 1.0})
    for call in (writer.flush, writer.raise_errors, lambda: writer.write("train", 2, {"loss": 1.0}), writer.close):
        with pytest.raises(TrainingError, match="cannot write metrics to .*last checkpoint"):
            call()


def test_a_full_disk_has_its_reason(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(str(tmp_path))
    writer.write("train", 1, {"loss": 1.0})
    with pytest.raises(TrainingError, match="No space left") as raised:
        writer.close()
    assert raised.value.reason is Reason.NO_SPACE


# --- in an object store -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(cloud_storage_in_process, monkeypatch):
    """A run's folder in a bucket; parts are uploaded with every line, and closed after three."""
    monkeypatch.setattr(metric_files._Lines, "period", 0.0)
    monkeypatch.setattr(metric_files._Lines, "most_bytes", 100)
    return f"{cloud_storage_in_process.bucket}/run"


def parts(bucket):
    return [name for name in bucket.objects() if name.startswith("run/metrics")]


def steps(folder):
    return [row["step"] for row in read_rows(folder)]


def write(folder, *steps):
    writer = MetricsWriter(folder)
    for step in steps:
        writer.write("train", step, {"loss": step / 2})
        writer.flush_lines()
    return writer


def test_parts_are_read_as_one(cloud_storage_in_process, folder):
    bucket = cloud_storage_in_process
    bucket.put(
        "run/metrics.jsonl", b'{"step": 8, "name": "train"}\n{"step": 9, "name": "train"}\n'
    )  # an earlier version's
    writer = write(folder, *range(10, 18))
    assert parts(bucket) == ["run/metrics.jsonl", *(f"run/metrics/00000000{n}.jsonl" for n in (10, 13, 16))]
    assert steps(folder) == list(range(8, 18)) and read_rows(folder)[-1] == {"step": 17, "name": "train", "loss": 8.5}
    assert "17" in metric_files.newest_text(folder) and metric_files.newest_text(folder).count("\n") == 2
    assert max(bucket.stats()["writes"][f"run/metrics/00000000{n}.jsonl"] for n in (10, 13, 16)) == 3
    writer.close()
    assert steps(folder) == list(range(8, 18))
    assert any("tfevents" in name for name in bucket.objects())

    # Killed here, and resumed from step 14: the part that began with 13 is cut, the later one is gone.
    assert MetricsWriter(folder).forget_after(14) == 17
    assert steps(folder) == list(range(8, 15)) and len(parts(bucket)) == 3
    write(folder, 14, 15).close()
    assert MetricsWriter(folder).forget_after(14) == 15  # killed again, without a new checkpoint
    write(folder, 14, 15, 16).close()
    assert parts(bucket)[-2:] == ["run/metrics/0000000014.jsonl", "run/metrics/0000000014_001.jsonl"]
    assert steps(folder) == [*range(8, 15), 14, 14, 15, 16]
    assert MetricsWriter(folder).forget_after(8) == 16
    assert steps(folder) == [8] and parts(bucket) == ["run/metrics.jsonl"]


def test_a_bucket_that_fails_for_a_while_loses_nothing(cloud_storage_in_process, folder, monkeypatch):
    monkeypatch.setattr("perex_t5x.background._PAUSES", (0.05,) * 6)
    wrong = {"operation": "insert|start upload", "name": "metrics/"}
    for fault in ({"action": "answer", "code": 503}, {"action": "answer", "code": 429}, {"action": "tear"}):
        cloud_storage_in_process.faults(rules=[{**wrong, **fault, "times": 1}])
        write(folder, 1, 2).close()
        assert steps(folder)[-2:] == [1, 2], fault
    assert len(steps(folder)) == 6


def test_a_bucket_that_may_not_be_written_is_said(cloud_storage_in_process, folder):
    cloud_storage_in_process.faults(deny=["storage.objects.create"])
    writer = MetricsWriter(folder)
    writer.write("train", 1, {"loss": 1.0})
    with pytest.raises(TrainingError, match="cannot write metrics to gs://.*storage.objects.create"):
        writer.flush()
    with pytest.raises(TrainingError, match="cannot write metrics"):
        writer.close()


def test_copied_parts_and_a_file_are_in_order(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0000000001.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "metrics" / "notes.jsonl").write_text('{"step": 7}\n')
    write(str(tmp_path), 3, 4).close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert read_rows(tmp_path / "nowhere") == []
