"""What a schedule hides: programs of a few lines, for a chip of one cycle and one megabyte per link a second."""

import dataclasses

import pytest

from perex_t5x.hardware.chips import chip
from perex_t5x.hardware.hlo.program import DCN, ICI, Program
from perex_t5x.preflight.overlap import with_hidden_seconds

# A collective-permute passes all its bytes over one link: a megabyte, f32[250,1000], takes one second.
CHIP = dataclasses.replace(chip("v5e"), clock_hz=1.0, link_bytes_per_second=1e6, dcn_bytes_per_second=1e6)
GROUPS = "replica_groups={{0,1}}"
MB = "f32[250,1000]"


def compute(name, cycles, calls=""):
    """An instruction of so many seconds; a fusion where it carries a collective."""
    opcode = "fusion" if calls else "convert"
    return f'  %{name} = {MB} {opcode}(%p){calls}, backend_config={{"estimated_cycles":"{cycles}"}}\n'


def permute(number):
    attributes = f"channel_id={number}, source_target_pairs={{{{0,1}}}}"
    start = f"  %s{number} = ({MB}, {MB}) collective-permute-start(%p), {attributes}\n"
    return start, f"  %d{number} = {MB} collective-permute-done(%s{number})\n"


def program(body, others="", turns=0):
    """The body as the whole program, or as a loop's."""
    text = f"HloModule m, is_scheduled=true, num_partitions=2\n{others}"
    if not turns:
        return (
            f"{text}\nENTRY %main (p: {MB}) -> {MB} {{\n  %p = {MB} parameter(0)\n{body}  ROOT %r = {MB} copy(%p)\n}}\n"
        )
    loop = f'condition=%c, body=%b, backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    return (
        f"{text}\n%b (p: {MB}) -> {MB} {{\n  %p = {MB} parameter(0)\n{body}  ROOT %r = {MB} copy(%p)\n}}\n"
        f"\n%c (q: {MB}) -> pred[] {{\n  %q = {MB} parameter(0)\n  ROOT %t = pred[] constant(true)\n}}\n"
        f"\nENTRY %main (a: {MB}) -> {MB} {{\n  %a = {MB} parameter(0)\n  ROOT %w = {MB} while(%a), {loop}\n}}\n"
    )


def hidden(text, network=ICI, kernels=None):
    parsed = Program(text)
    collectives = [dataclasses.replace(c, network=network, group_size=2) for c in parsed.collectives()]
    return {c.name: c.hidden_seconds for c in with_hidden_seconds(parsed, collectives, CHIP, kernels or {})}


START, DONE = permute(1)


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (START + compute("f", 3) + DONE, 1.0),  # no longer than it takes
        (START + DONE + compute("f", 3), 0.0),
        (compute("f", 3) + START + DONE, 0.0),
    ],
)
def test_between_start_and_end(body, seconds):
    assert hidden(program(body)) == {"s1": seconds}
    assert hidden(program(body, turns=20)) == {"s1": pytest.approx(20 * seconds)}


def test_two_in_flight_share_the_links_but_not_those_of_another_network():
    other, done = permute(2)
    text = program(START + other + compute("f", 1) + DONE + compute("g", 0) + done)
    assert hidden(text) == {"s1": 1.0, "s2": 0.0}
    longer = program(START + other + compute("f", 1) + DONE + compute("g", 1) + done)
    assert hidden(longer) == {"s1": 1.0, "s2": 1.0}


def test_a_loop_and_a_kernel_hide_too():
    kernel = f'  %k = {MB} custom-call(%p), custom_call_target="tpu_custom_call"\n'
    assert hidden(program(START + kernel + DONE), kernels={"k": 1}) == {"s1": 1.0}
    assert hidden(program(START + kernel + DONE)) == {"s1": 0.0}


def gather(name, flag, shape="f32[125,1000]"):
    """A fusion's computation with a step of an all-gather: half a megabyte passes, over two links."""
    config = f'backend_config={{"async_collective_fusion_config":{{"flag_start":"{flag}"}}}}'
    return (
        f"\n%{name} (x: {shape}) -> {MB} {{\n  %x.{name} = {shape} parameter(0)\n"
        f"  ROOT %ag.{name} = {MB} all-gather(%x.{name}), channel_id=7, {GROUPS}, dimensions={{0}}, {config}\n}}\n"
    )


def test_a_collective_that_the_core_issues_advances_in_the_fusions_that_carry_it():
    others = gather("first", -1) + gather("middle", 2) + gather("last", 2)
    start = f"  %async-collective-start = {MB} fusion(%p), kind=kCustom, calls=%first\n"
    done = f"  %async-collective-done = {MB} fusion(%p), kind=kCustom, calls=%last\n"
    carrying = start + compute("f", 5) + compute("g", 0, ", calls=%middle") + done
    assert hidden(program(carrying, others)) == {"ag.first": 0.0}
    carrying = start + compute("f", 5) + compute("g", 2, ", calls=%middle") + done
    assert hidden(program(carrying, others)) == {"ag.first": pytest.approx(0.25)}


def test_synchronous_collectives_hide_nothing_and_are_not_hidden():
    body = f"  %ag = {MB} all-gather(%p), channel_id=3, {GROUPS}, dimensions={{0}}\n"
    assert hidden(program(START + body + DONE + compute("f", 9))) == {"s1": 0.0, "ag": 0.0}


def test_between_slices_until_the_sum_is_back():
    attributes = 'frontend_attributes={_xla_host_transfer_rendezvous="t",_xla_megascale_transfer_type="ALL_REDUCE"}'
    send = f"  %s = ({MB}, u32[], token[]) send(%p), channel_id=2, {attributes}\n"
    recv = f"  %v = ({MB}, u32[], token[]) recv(%p), channel_id=1, {attributes}\n"
    sent, received = "  %sd = token[] send-done(%s)\n", f"  %vd = ({MB}, token[]) recv-done(%v)\n"
    assert hidden(program(send + recv + sent + compute("f", 9) + received), DCN)["s"] > 0
    assert hidden(program(send + recv + compute("f", 0) + received + compute("g", 9) + sent), DCN)["s"] == 0
