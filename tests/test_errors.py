"""The table of reasons: one exit code each, and the way back."""

import pytest

from perex_t5x import errors
from perex_t5x.errors import Reason


def test_every_reason_has_its_own_exit_code():
    codes = [reason.exit_code for reason in Reason]
    assert len(set(codes)) == len(codes)
    assert all(Reason.of_exit_code(reason.exit_code) is reason for reason in Reason)


@pytest.mark.parametrize(
    ("code", "reason"), [(-15, Reason.KILLED), (143, Reason.KILLED), (-9, Reason.KILLED), (77, Reason.ERROR)]
)
def test_codes_of_other_programs(code, reason):
    assert Reason.of_exit_code(code) is reason


def test_what_may_pass_and_what_will_not():
    retried = {reason for reason in Reason if reason.retryable}
    assert retried == {Reason.ERROR, Reason.UNREACHABLE, Reason.PEER_LOST, Reason.INTERRUPTED, Reason.KILLED,
                       Reason.BUSY, Reason.NO_SPACE, Reason.TIMEOUT}  # fmt: skip
    assert {reason for reason in Reason if reason.final} == set(Reason) - retried - {Reason.DONE}


def test_every_error_class_carries_its_reason():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert {c.__name__: c.reason for c in classes} == {
        "ConfigError": Reason.CONFIGURATION,
        "TrainingError": Reason.ERROR,
        "DivergedError": Reason.DIVERGED,
        "UnreachableError": Reason.UNREACHABLE,
        "PeerLostError": Reason.PEER_LOST,
        "InUseError": Reason.BUSY,
        "NoSpaceError": Reason.NO_SPACE,
        "DeniedError": Reason.CONFIGURATION,
    }


def test_the_documented_table_is_this_one():
    with open("docs/multi_host.md", encoding="utf-8") as f:
        text = f.read()
    for reason in Reason:
        if reason is not Reason.KILLED:
            assert f"| {reason.exit_code} | `{reason}`" in text
