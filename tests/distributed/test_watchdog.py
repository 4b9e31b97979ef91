"""Who is to blame, by a clock that the tests turn."""

from perex_t5x.distributed.watchdog import TROUBLE_SECONDS, Beat, Verdict, Watchdog
from perex_t5x.errors import Reason

HOSTS = ["a", "b", "c"]


class Watched:
    """A judge that looks every second; `beats` gives each process's beat at a time, or None for silence."""

    def __init__(self, timeout=10.0, phase_timeout=100.0):
        self.judge = Watchdog(HOSTS, timeout, phase_timeout, now=0.0)

    def until(self, last, beats):
        """(time, verdict) of the first verdict up to the time `last`; None if there is none."""
        for now in range(1, last + 1):
            for process, beat in enumerate(beats(now)):
                if beat is not None:
                    self.judge.observe(process, beat, float(now))
            if verdict := self.judge.verdict(float(now)):
                return now, verdict
        return None


def stepping(now, **changes):
    return Beat(number=now, **{"mark": now, "doing": f"making step {now}", "patient": False, **changes})


def test_all_well():
    assert Watched().until(500, lambda t: [stepping(t)] * 3) is None


def test_silence():
    now, verdict = Watched().until(100, lambda t: [stepping(t), stepping(t) if t < 50 else None, stepping(t)])
    assert now == 60 and verdict.process == 1 and not verdict.answers
    assert "process 1 (b) has not answered for 11 s" in verdict.text


def test_a_failed_collective_shortens_the_silence_that_is_needed():
    def beats(t):
        return [stepping(min(t, 51), trouble=t > 50), None if t > 50 else stepping(t), stepping(t)]

    def numbered(t):
        first, second, third = beats(t)
        return [Beat(**{**vars(first), "number": t}), second, third]

    now, verdict = Watched(timeout=60.0).until(100, numbered)
    assert verdict.process == 1 and now == 50 + TROUBLE_SECONDS + 1


def test_standing_still_is_the_one_behind():
    def beats(t):
        held = min(t, 52)
        ahead = stepping(t, mark=held, doing=f"making step {held}")
        behind = stepping(t, mark=min(t, 50), doing="reading the batch of step 51")
        return [ahead, behind, ahead]

    now, verdict = Watched().until(100, beats)
    assert verdict.process == 1 and 60 <= now <= 63 and verdict.answers
    assert (
        "process 1 (b) makes no progress" in verdict.text and "it has been reading the batch of step 51" in verdict.text
    )


def test_all_standing_still_together_for_long():
    def beats(t):
        return [stepping(t, mark=min(t, 50), doing="saving checkpoint_50", patient=t % 2 == 0)] * 3

    now, verdict = Watched().until(1000, beats)
    assert now == 151 and verdict.answers and verdict.reason is Reason.PEER_LOST
    assert "all 3 processes make no progress: for 101 s they have been saving checkpoint_50" in verdict.text


def test_before_the_first_step_all_may_take_long_together():
    assert Watched().until(1000, lambda t: [stepping(t, mark=0)] * 3) is None


def test_something_that_may_take_long_may():
    def beats(t):
        return [
            stepping(t, mark=6),
            stepping(t, mark=5, doing="saving checkpoint_5", patient=True),
            stepping(t, mark=6),
        ]

    now, verdict = Watched().until(200, beats)
    assert now > 100 and "saving checkpoint_5" in verdict.text


def test_one_step_behind_for_a_moment_is_normal():
    assert Watched().until(500, lambda t: [stepping(t), stepping(t, mark=t - 1), stepping(t)]) is None


def test_a_judge_that_was_suspended_blames_nobody():
    watched = Watched()
    watched.until(20, lambda t: [stepping(t)] * 3)
    assert watched.judge.verdict(500.0) is None
    assert watched.judge.verdict(504.0) is None
    assert watched.judge.verdict(508.0) is None
    assert watched.judge.verdict(511.0).process == 0


def test_verdicts_travel_as_text():
    verdict = Verdict(2, "why", Reason.CONFIGURATION, False)
    assert Verdict.from_json(verdict.to_json()) == verdict
