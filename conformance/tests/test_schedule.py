"""Learning rates that can be redone on paper."""

import pytest

from core_numpy.contract.config import TrainConfig
from core_numpy.contract.schedule import learning_rate

# steps 12, warm-up 2, lr 1, final 0.2: cosine and linear have ten updates to fall by 0.8.
CONFIG = {"steps": 12, "warmup": 2, "lr": 1.0, "final_lr": 0.2}
TABLE = [
    ("constant", {}, {1: 0.5, 2: 1.0, 3: 1.0, 12: 1.0, 99: 1.0}),
    ("linear", {}, {1: 0.5, 2: 1.0, 3: 0.92, 7: 0.6, 11: 0.28, 12: 0.2, 13: 0.2}),
    # cos(pi * 5 / 10) = 0; cos(pi / 10) = 0.9510565162951535
    ("cosine", {}, {1: 0.5, 2: 1.0, 3: 0.2 + 0.4 * 1.9510565162951535, 7: 0.6, 12: 0.2, 13: 0.2}),
    ("wsd", {"decay_steps": 4}, {1: 0.5, 2: 1.0, 8: 1.0, 9: 0.8, 10: 0.6, 11: 0.4, 12: 0.2, 13: 0.2}),
    ("wsd", {}, {1: 0.5, 11: 1.0, 12: 0.2, 13: 0.2}),  # a tenth of 12 steps, rounded down, is 1
    ("wsd", {"decay_steps": 0}, {11: 1.0, 12: 1.0}),
]


@pytest.mark.parametrize(("schedule", "more", "expected"), TABLE)
def test_each_update_has_the_rate_computed_by_hand(schedule, more, expected):
    config = TrainConfig(schedule=schedule, **CONFIG, **more)
    for t, rate in expected.items():
        assert learning_rate(config, t) == pytest.approx(rate, rel=1e-15), (schedule, t)


def test_no_warmup_starts_at_the_full_rate():
    assert learning_rate(TrainConfig(steps=4, lr=0.5), 1) == 0.5
    assert learning_rate(TrainConfig(steps=4, lr=0.5, schedule="linear"), 1) == 0.375


def test_a_warmup_as_long_as_the_run_only_warms_up():
    config = TrainConfig(steps=4, warmup=4, lr=1.0, schedule="wsd")
    assert [learning_rate(config, t) for t in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("t", "exception"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_updates_are_counted_from_one(t, exception):
    with pytest.raises(exception, match="t must be an integer of at least 1"):
        learning_rate(TrainConfig(), t)
