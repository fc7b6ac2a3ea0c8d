"""What a line of a kind may say: a letter of its own, and as many kinds as integers have room for."""

from collections.abc import Iterator
from itertools import permutations
from string import ascii_uppercase

import numpy as np
import pytest

from distsim.errors import ScheduleError
from distsim.report import describe_schedule
from distsim.schedule import Action, Kind, Schedule, action, codes, one_f_one_b, schedule
from distsim.schedule.action import InFlight, WaitsFor, way_of
from distsim.simulation.schedule_times import time_schedule


@pytest.fixture
def kinds() -> Iterator[dict[str, Kind]]:
    """The kinds by name, as they are again afterwards."""
    made = dict(Kind._member_map_)
    yield Kind._member_map_
    Kind._member_map_.clear()
    Kind._member_map_.update(made)


def free_letters() -> list[str]:
    return [letter for letter in ascii_uppercase if letter not in {"U", *[kind.value for kind in Kind]}]


def line(letter: str) -> tuple:
    return letter, "another", "#000000", InFlight(), WaitsFor()


@pytest.mark.parametrize(
    ("letter", "other"), [("B", "backward"), ("W", "backward of weights"), ("U", "updates of weights")]
)
def test_a_letter_is_of_one_kind_and_of_no_update(letter, other):
    """Else the line of a letter would be lost: the enum takes it for another name of the first."""
    with pytest.raises(ScheduleError, match=rf"'{letter}' \(another\) has the letter of another, {other}; "):
        Kind._new_member_(Kind, *line(letter))
    with pytest.raises(ScheduleError, match="; choose from ") as refused:
        Kind._new_member_(Kind, *line(letter))
    assert str(refused.value).partition("choose from ")[2].split(", ") == free_letters()


@pytest.mark.parametrize("letter", ["", "XY", "@", "x", "3"])
def test_a_letter_is_a_capital(letter):
    with pytest.raises(ScheduleError, match=r"\(another\) has no letter; choose one, A to Z"):
        Kind._new_member_(Kind, *line(letter))


def test_there_is_room_for_kinds(kinds):
    """For eight besides those of torch, at least; see also the one too many in test_action_kinds.py."""
    for letter in free_letters()[: codes.NO_KIND - len(Kind)]:
        kinds[letter] = Kind._new_member_(Kind, *line(letter))
    assert len({kind.code for kind in kinds.values()}) == len(kinds) >= 12
    assert max(kind.code for kind in kinds.values()) < codes.NO_KIND


def test_what_is_said_of_integers_follows_from_their_bits():
    """Of two microbatches on one stage the codes are as far apart as an error says."""
    made = one_f_one_b(1, 2)
    apart = codes.code_of(1, 0)
    assert [row[0] for row in made.codes[0].tolist()] == [0, 1, apart, apart + 1]
    with pytest.raises(
        ScheduleError, match=rf"give \(microbatch \* num_stages \+ stage\) \* {apart} \+ kind"
    ):
        Schedule.from_codes("mine", 1, 1, [np.array([[0.5, -1.0]])])


@pytest.mark.parametrize("ways", [*permutations(["FB", "FIW", "FBIW"]), ("FWI", "BF")])
def test_the_order_of_ways_tells_nothing(ways, monkeypatch):
    """A way with more kinds than another, wherever it stands, is that of what has them all only."""
    monkeypatch.setattr(action, "_WAY_OF", action.ways_by_sum(ways))
    assert {*way_of(0)} == {Kind.FORWARD, Kind.BACKWARD}
    assert {*way_of(Kind.BACKWARD_INPUT.bit)} == {*map(Kind, "FIW")}
    assert len(way_of(Kind.BACKWARD_INPUT.bit + Kind.BACKWARD.bit)) == (4 if len(ways) > 2 else 0)
    made = schedule("zb_h1", 2, 2)
    other = Schedule("mine", 2, 2, made.ranks)
    other.check()
    assert other.inputs(Action(Kind("W"), 0, 0)) == (Action(Kind("I"), 0, 0),)
    assert "forward 1, backward 1 + 1, send 0" in describe_schedule(time_schedule(other))
