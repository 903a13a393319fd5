"""What a step sends between devices, by hand, and as torch and XLA send it (test_parallel_*)."""

from __future__ import annotations

import pytest

import core_numpy as C
from conformance import plan
from core_numpy.contract.communication import (
    Message,
    local_parameters,
    ring_steps,
    step_communication,
    wire_bytes,
)
from core_numpy.contract.parallel import Layout

# W 8, H 2, D 4, hidden 6, V 10, no biases: per block 4 W W + 3 W F = 256 + 144 cut, norms 2 W = 16 whole.
MODEL = C.ModelConfig(
    vocab=10, width=8, heads=2, hidden=6, layers=3, max_length=16, positions="rotary", norm="rms", activation="swiglu",
    attention_bias=False, ffn_bias=False,
)  # fmt: skip
WHOLE = 10 * 8 + 3 * 16 + 8 + 8 * 10  # embedding, norms, head


def sent(parallel, **more):
    return step_communication(MODEL, Layout(**parallel), 4, 8, **more)


def test_parameters_that_are_cut_and_that_are_whole():
    assert local_parameters(MODEL, Layout()) == (3 * 400, WHOLE)
    assert local_parameters(MODEL, Layout(tensor=2)) == (3 * 200, WHOLE)


def test_gradients_over_data_are_one_sum_of_all_parameters():
    (message,) = sent({"data": 4})
    assert (message.kind, message.times, message.bytes) == ("all-reduce", 1, 4 * (1200 + WHOLE))
    assert message.wire == 2 * 4 * (1200 + WHOLE) * 3 // 4


def test_parameters_over_fsdp_are_gathered_twice_but_for_the_root_s():
    gather, scatter = sent({"fsdp": 2}, accumulate=2)
    assert gather.bytes == 4 * (1200 + WHOLE + 1200 + 48) and gather.times == 2
    assert scatter.bytes == 4 * (1200 + WHOLE) and scatter.wire == 2 * scatter.bytes // 2
    once, _ = sent({"fsdp": 2}, gathers=1)
    assert once.bytes == 4 * (1200 + WHOLE)
    half, _ = sent({"fsdp": 2}, itemsize=2)
    assert half.bytes * 2 == gather.bytes


def test_activations_over_tensor_are_summed_seven_times_in_a_gated_block():
    (message,) = sent({"tensor": 2})
    assert (message.times, message.bytes) == (7 * 3, 4 * 8 * 8 * 4)
    (twice,) = sent({"tensor": 2}, accumulate=2)
    assert (twice.times, twice.bytes) == (2 * 7 * 3, 4 * 8 * 8 * 4 // 2)


def test_keys_go_round_the_context_axis_and_their_gradients_come_back():
    _, keys, gradients = sent({"context": 4})
    assert keys.times == 2 * 3 * 3 and keys.bytes == 4 * 2 * 2 * 8 * 4
    assert gradients.times == 3 * 3 and keys.wire == keys.times * keys.bytes
    assert gradients.bytes == keys.bytes
    _, half, added = sent({"context": 4}, itemsize=2)  # gradients are added up in float32
    assert half.bytes * 2 == keys.bytes and added.bytes == gradients.bytes


@pytest.mark.parametrize(
    ("window", "causal", "steps"),
    [(None, True, 7), (None, False, 7), ((4, 0), True, 2), ((8, 0), True, 2), ((9, 0), True, 4), ((0, 0), True, 0),
     ((8, 8), False, 2)],
)  # fmt: skip
def test_with_a_window_only_neighbours_talk(window, causal, steps):
    # Eight devices, 128 positions causal in pieces of 8, else 64 in pieces of 8.
    length = 128 if causal else 64
    assert ring_steps(MODEL.replace(window=window), 8, length, causal=causal) == steps


def test_shares_on_the_wire():
    assert Message("data", "all-reduce", "x", 1, 100, 4).wire == 150
    assert Message("fsdp", "all-gather", "x", 3, 100, 4).wire == 225
    assert wire_bytes([Message("context", "send", "x", 2, 10, 4)]) == {"data": 0, "fsdp": 0, "context": 20, "tensor": 0}


def test_the_plan_has_a_line_for_one_to_4096_devices_and_its_bounds_are_in_order():
    rows = plan.plan()
    assert [r.devices for r in rows] == list(plan.LAYOUTS) and rows[0].devices == 1 and rows[-1].devices == 4096
    assert rows[0].communication == 0 and all(r.fastest <= r.slowest for r in rows)
    # 6.74 billion parameters, 16 bytes each, over eight devices: 13.5 GB, and a block's.
    assert rows[1].weights == pytest.approx(6.74e9 * (16 / 8 + 4 / 32), rel=1e-2)


def test_in_the_plan_only_copies_leave_a_host():
    for layout in plan.LAYOUTS.values():
        assert layout.fsdp * layout.context * layout.tensor <= plan.Device().per_host


def test_the_plan_says_that_it_is_computed(capsys):
    assert plan.main([]) == 0
    assert "computed, not measured" in capsys.readouterr().out
