"""Lines where there is no terminal, a bar where there is one; with a fake clock."""

import io

import pytest

from perex_t5x.cli.progress import Progress, duration


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_are_rare_and_say_what_is_left():
    clock, out = Clock(), io.StringIO()
    with Progress(0, 100, stream=out, clock=clock, period=10) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step, {"loss": 2.5, "tokens/s": 52133.0})
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "step 10/100  loss 2.5  tokens/s 52.1k  ETA 1:30"
    assert lines[-1].startswith("step 100/100") and lines[-1].endswith("ETA 0:00")


def test_bar_in_a_terminal():
    out = Terminal()
    with Progress(0, 4, stream=out) as progress:
        progress.update(4, {"loss": 1.25})
    assert "training" in out.getvalue() and "4/4" in out.getvalue() and "1.25" in out.getvalue()


def test_disabled_is_silent():
    out = Terminal()
    with Progress(0, 4, stream=out, enabled=False) as progress:
        progress.update(4, {"loss": 1.25})
    assert not out.getvalue()


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="total 3 is before start 5"):
        Progress(5, 3)


def test_duration():
    assert [duration(s) for s in (5, 65, 3700, float("nan"))] == ["0:05", "1:05", "1:01:40", "?"]
