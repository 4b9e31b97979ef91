"""metrics.jsonl in any state: every reader gives the lines that can be read, and a resumed run rewrites it."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x import goodput, metric_files
from tests import fuzzing

ROWS = [
    {"step": 0, "name": "train", "timing/compilation_seconds": 1.5},
    {"step": 2, "name": "train", "loss": 3.5, "per_example/snr/all": 0.1},
    {"step": 2, "name": "training_eval/task", "loss": 3.25, "accuracy": 0.5},
    {"step": 4, "name": "train", "loss": "nan"},
    {"step": 4, "name": "training_eval/task", "loss": 3.0},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ODD_ROWS = [
    b"[]",
    b"3",
    b"null",
    b'"step"',
    b"{}",
    b'{"step": null}',
    b'{"step": "2", "name": "train"}',
    b'{"step": true, "name": "train"}',
    b'{"step": 1e400, "name": "train"}',
    b'{"step": Infinity, "name": "train"}',
    b'{"step": NaN, "name": "train"}',
    b'{"step": -5, "name": "train"}',
    b'{"step": 2.5, "name": "train", "loss": 1}',
    b'{"step": ' + b"9" * 400 + b', "name": "train"}',
    b'{"step": ' + b"9" * 5000 + b', "name": "train"}',
    b'{"step": 2, "name": null}',
    b'{"step": 2, "name": ["train"]}',
    b'{"step": 2, "name": {}}',
    b'{"step": 2, "name": "../../x", "loss": 1}',
    b'{"step": 2, "name": "train", "loss": {"a": 1}}',
    b'{"step": 2, "name": "train", "loss": null}',
    b'{"step": 2, "name": "train", "loss": ' + b"9" * 400 + b"}",
    b'{"step": 2, "name": "training_eval/task", "loss": "x"}',
    b'{"step": 2, "step": 3, "name": "train"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x00" * 50,
    b'{"step": 1e30, "name": "train"}',
    b'{"step": 2, "name": "\\ud800", "loss": 1}',
]


@st.composite
def contents(draw):
    """Lines of which some are odd, and the text of some is damaged."""
    lines = draw(st.lists(st.one_of(st.sampled_from(LINES.splitlines()), st.sampled_from(ODD_ROWS)), max_size=5))
    content = b"\n".join(lines) + draw(st.sampled_from([b"", b"\n", b"\r\n", b"\n\n"]))
    return draw(st.one_of(st.just(content), fuzzing.damaged(content), fuzzing.damaged(LINES)))


def same(some: list[dict], others: list[dict]) -> bool:
    """Lines of a file and of parts are read by step, so in another order than they were in."""
    return sorted(map(json.dumps, some)) == sorted(map(json.dumps, others))


def check(content: bytes, part: bool, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics/0000000000.jsonl" if part else "metrics.jsonl")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        with fuzzing.ends():
            rows = metric_files.read_rows(folder)
            assert isinstance(metric_files.newest_text(folder), str)
            writer = metric_files.MetricsWriter(folder)
            try:
                writer.rows_of({"training_eval/task"})
                reached = writer.forget_after(step)
                recorder = goodput.Recorder()
                recorder.follow(folder, step, reached)
                recorder.step(step + 1)
                assert (
                    all(row["step"] <= step for row in writer._read()) and isinstance(reached, int) and reached >= step
                )
                names = writer.names_at(step)
                writer.write("train", step + 1, {"loss": 1.0})
            finally:
                writer.close()
            kept = metric_files.read_rows(folder)
        # Nothing that could be read and is not later than the step is lost, and the run's new line is there.
        assert same(kept[:-1], [row for row in rows if row["step"] <= step])
        assert kept[-1] == {"step": step + 1, "name": "train", "loss": 1.0}
        assert set(names) == {str(row.get("name")) for row in rows if row["step"] == step}


@example(b'{"step": 2, "name": "train"}', False, 2)  # without its line feed: the next line would be glued to it
@fuzzing.few(60)
@given(content=contents(), part=st.booleans(), step=st.sampled_from([0, 2, 3, 4]))
def test_whatever_is_in_the_file(content, part, step):
    check(content, part, step)


@pytest.mark.slow
@fuzzing.many(4000)
@given(content=contents(), part=st.booleans(), step=st.sampled_from([0, 2, 3, 4]))
def test_whatever_is_in_many_files(content, part, step):
    check(content, part, step)
