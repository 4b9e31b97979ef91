"""Commands, and that nothing stays behind unnoticed."""

import os
import signal
import sys

import pytest

from perex_t5x import cli
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching.shell import CommandError, Commands, Leftovers


def python(code):
    return [sys.executable, "-c", code]


def test_arguments_arrive_as_they_are(tmp_path):
    hostile = ["$(touch x)", "a b", "'; rm -rf", "`x`", "\n"]
    said = Commands().run([*python("import sys; print(sys.argv[1:])"), *hostile], cwd=str(tmp_path)).stdout
    assert said.strip() == repr(hostile)
    assert os.listdir(tmp_path) == []


def test_retries_with_growing_pauses(tmp_path):
    pauses = []
    count = python(f"open({str(tmp_path / 'n')!r}, 'a').write('x'); import sys; sys.exit('try again')")
    with pytest.raises(CommandError, match="status 1:\n  try again"):
        Commands(wait=1, sleep=pauses.append).run(count, retries=3)
    assert pauses == [1, 2, 4]
    assert (tmp_path / "n").read_text() == "xxxx"
    pauses.clear()
    Commands(sleep=pauses.append).run(count, retries=3, retry_on=["something else"], check=False)
    assert pauses == []


def test_missing_programs_and_slow_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="gcloud is not installed.*cloud.google.com/sdk"):
        Commands().run(["gcloud", "version"])
    assert Commands().run(python("import time; time.sleep(60)"), timeout=0.2, check=False).returncode == 124


def test_what_cannot_be_written_is_named():
    with pytest.raises(TrainingError, match="/dev/full cannot be written: No space left"):
        Commands().write("/dev/full", "x" * 100_000)


def test_dry_run_prints_what_a_shell_would_take(capsys):
    Commands(dry_run=True).run(["gcloud", "a b", "$(x)"])
    assert capsys.readouterr().out == "gcloud 'a b' '$(x)'\n"


def deletion(path, fails=False):
    return python(f"import sys; open({str(path)!r}, 'a').write('x'); sys.exit({'HTTP 500' if fails else 0!r})")


@pytest.mark.parametrize(
    "error", [TrainingError("e"), ConfigError("e"), KeyboardInterrupt("e"), ZeroDivisionError("e")]
)
def test_leftovers_are_deleted_whatever_happens(tmp_path, error):
    with pytest.raises(type(error)) as e, Leftovers(Commands()) as leftovers:
        leftovers.add("resource a", deletion(tmp_path / "a"))
        leftovers.add("resource b", deletion(tmp_path / "b"))
        leftovers.keep("resource b")
        raise error
    assert sorted(os.listdir(tmp_path)) == ["a"]
    assert not hasattr(e.value, "__notes__")


def test_success_deletes_nothing(tmp_path):
    with Leftovers(Commands()) as leftovers:
        leftovers.add("resource a", deletion(tmp_path / "a"))
    assert os.listdir(tmp_path) == []


def test_sigterm_is_heard(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), Leftovers(Commands()) as leftovers:
        leftovers.add("resource a", deletion(tmp_path / "a"))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("keep", [True, False])
def test_what_stays_is_named_in_the_last_line(tmp_path, capsys, keep):
    def main():
        with Leftovers(Commands(sleep=lambda s: None), keep=keep) as leftovers:
            leftovers.add("resource a", deletion(tmp_path / "a", fails=True))
            raise TrainingError("it broke")

    assert cli.guarded(main) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert "ERROR: it broke" in said
    assert said[-1].startswith("still there: resource a; delete it with: ")
    assert (tmp_path / "a").exists() is not keep


def test_a_tool_that_breaks_has_deleted_nothing():
    for said in ("ERROR: gcloud crashed (FileNotFoundError): no credentials", "gcloud: exec: python3: not found"):
        with pytest.raises(TrainingError) as e, Leftovers(Commands(sleep=lambda s: None)) as leftovers:
            leftovers.add("resource a", python(f"import sys; sys.exit({said!r})"))
            raise TrainingError("x")
        assert e.value.__notes__[0].startswith("still there: resource a; delete it with: ")


def test_what_is_not_there_counts_as_deleted():
    gone = python("import sys; sys.exit('ERROR: (gcloud.compute) NOT_FOUND: Requested entity was not found.')")
    with pytest.raises(TrainingError) as e, Leftovers(Commands(sleep=lambda s: None)) as leftovers:
        leftovers.add("resource a", gone)
        raise TrainingError("x")
    assert not hasattr(e.value, "__notes__")


def test_sigterm_during_a_check_ends_its_process(tmp_path, capsys):
    pid = tmp_path / "pid"
    check = (
        f"import os, signal, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    )
    assert cli.guarded(lambda: Commands().run(python(check))) == 130
    assert "stopped by SIGTERM" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_nohup_ignores_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Leftovers(Commands()):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
