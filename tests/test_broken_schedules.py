"""Hand-made schedules that must be refused, with a message that names what is wrong."""

from functools import partial

import pytest

from distsim.errors import ScheduleError
from distsim.schedule import Action, Kind, Schedule, issue_order


def F(stage: int, microbatch: int) -> Action:
    return Action(Kind.FORWARD, stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action(Kind.BACKWARD, stage, microbatch)


@pytest.mark.parametrize(
    ("num_microbatches", "ranks", "message"),
    [
        (1, ((F(0, 0), B(0, 0)), (F(1, 0),)), "missing B0@1"),
        (1, ((), ()), "missing F0@0, F0@1, B0@0, B0@1;"),
        (9, ((), ()), "missing F0@0, F1@0, F2@0, F3@0, F4@0 and 31 more"),
        (1, ((F(0, 0), F(0, 0), B(0, 0)), (F(1, 0), B(1, 0))), "F0@0 is listed twice"),
        (
            1,
            ((F(0, 0), B(1, 0)), (F(1, 0), B(0, 0))),
            "B0@1, but stage 1 is on rank 1; a stage",
        ),
        (1, ((F(0, 0), B(0, 0)), (F(1, 0), B(1, 1))), "rank 1 lists B1@1, but stages are 0..1 and"),
        (1, ((F(0, 0), B(0, 0)), (F(1, -1), B(1, 0))), "rank 1 lists F-1@1, but stages are 0..1 and"),
        (1, ((F(0, 0), B(0, 0)),), "missing F0@1, B0@1;"),
        (1, ((B(0, 0), F(0, 0)), (F(1, 0), B(1, 0))), "B0@0 waits for F0@0, which rank 0 runs after B0@0;"),
        (
            2,
            ((F(0, 0), B(0, 0), F(0, 1), B(0, 1)), (F(1, 0), F(1, 1), B(1, 0), B(1, 1))),
            "deadlocks after 2 actions: B0@0 waits for B0@1, which rank 1 runs after F1@1; "
            "F1@1 waits for F1@0, which rank 0 runs after B0@0; reorder",
        ),
    ],
)
def test_a_broken_schedule_is_refused_by_name(num_microbatches, ranks, message):
    broken = Schedule("mine", 2, num_microbatches, ranks)
    for verify in (broken.check, broken.order, partial(issue_order, broken)):
        with pytest.raises(ScheduleError, match="^mine") as caught:
            verify()
        assert message in str(caught.value)


def test_a_deadlock_names_only_its_circle_not_the_ranks_that_wait_for_it():
    # Rank 0 waits for ranks 1 and 2, which wait for each other.
    ranks = (
        (F(0, 0), F(0, 1), B(0, 0), B(0, 1)),
        (F(1, 0), B(1, 0), F(1, 1), B(1, 1)),
        (F(2, 0), F(2, 1), B(2, 0), B(2, 1)),
    )
    with pytest.raises(ScheduleError) as caught:
        Schedule("mine", 3, 2, ranks).order()
    assert "B0@1 waits for B0@2" in str(caught.value)
    assert "F1@2 waits for F1@1" in str(caught.value)
    assert "@0" not in str(caught.value)
