"""What each kind of action says of itself, and that integers tell kinds apart."""

import pytest

from distsim.errors import ScheduleError
from distsim.schedule import Kind


def test_what_a_kind_says_is_what_its_microbatch_leaves_behind():
    """Whole or in halves, a microbatch holds nothing after its backward, and all but W has its own sums."""
    for ways in ((Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)):
        assert sum(kind.until_i for kind in ways) == sum(kind.pending_w for kind in ways) == 0
        assert len({kind.sums for kind in ways}) == len(ways)
    assert Kind.BACKWARD.sums == Kind.BACKWARD_WEIGHT.sums


def test_a_kind_that_integers_do_not_tell_apart_is_refused():
    with pytest.raises(ScheduleError, match="kind 'O' is number 4, and the integers of a schedule tell 4"):
        Kind._new_member_(Kind, "O", "offload", 3, 0, 0)
