"""What the first run says at its end."""

import json
import re

import pytest

from perex_t5x import quickstart


@pytest.mark.parametrize(
    "noise_scale,expected",
    [
        (400.0, "SNR 0.05: .*Noise scale 400: .* With 16 the noise is 5 times the signal."),
        (4.0, "SNR 0.5: .*Noise scale 4: .* With 16 the signal is 2 times the noise."),
        (float("inf"), "No signal stood out of the noise between examples: a batch of 16 is too small"),
    ],
)
def test_closing_words_explain_the_runs_own_numbers(noise_scale, expected):
    words = quickstart.closing_words("runs/a b", [(900, 1.5)], 3.2, noise_scale, 16)
    assert "900 steps. Validation loss 1.500" in words and "'runs/a b'" in words
    assert re.search(expected, words, re.DOTALL)


def test_without_a_monitor_nothing_is_said_of_noise():
    assert "oise" not in quickstart.closing_words("runs/a", [(900, 1.5)], 3.2).split("What to look at")[0]


def test_numbers_are_read_from_the_metrics(tmp_path):
    name = "per_example/noise_scale_smoothed/all"
    rows = [
        {"step": 20, "name": "train", name: 12.0},
        {"step": 40, "name": "train", name: "inf"},
        {"step": 50, "name": "training_eval/x", "loss_per_nonpadding_target_token": 2.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert quickstart.last_noise_scale(str(tmp_path)) == float("inf")
    assert quickstart.validation_losses(str(tmp_path)) == [(50, 2.0)]
    path.write_text(json.dumps(rows[2]) + "\n")
    assert quickstart.last_noise_scale(str(tmp_path)) is None
