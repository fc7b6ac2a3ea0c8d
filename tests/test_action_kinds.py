"""What each kind of action says of itself, and that integers tell kinds apart."""

import ast
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import pytest

from distsim import simulate
from distsim.errors import IRError, PlanError, ScheduleError
from distsim.ir import Value
from distsim.ir.type import Float32
from distsim.program.block import Block
from distsim.program.links import Maker, Row, verify_actions
from distsim.schedule import Kind, one_f_one_b, torch_csv, write_csv
from distsim.schedule.action import HALVES, UPDATE_LETTER, WAYS, InFlight, Runs, WaitsFor, way_of
from distsim.schedule.codes import CODES, NO_KIND
from distsim.simulation.action_times import timed_program
from distsim.stage_balance import tables


def test_what_a_kind_says_is_what_its_microbatch_leaves_behind():
    """In any way a microbatch holds nothing after its backward, and all but W has its own sums."""
    for letters in WAYS:
        ways = [Kind(letter) for letter in letters]
        freed = "".join([kind.in_flight.frees for kind in ways])
        left = [kind.in_flight for kind in ways if kind.value not in freed]
        assert sum(each.until_i for each in left) == sum(each.pending_w for each in left) == 0
        assert len({kind.sums for kind in ways}) == len(ways)
    assert Kind.BACKWARD.sums == Kind.BACKWARD_WEIGHT.sums
    assert {*"".join(WAYS)} == {kind.value for kind in Kind}


def test_every_kind_runs_a_part_of_a_program_and_one_that_does_not_is_named(monkeypatch):
    program, _ = timed_program(one_f_one_b(2, 1))
    own = [[program.parts.part(stage, kind) for kind in Kind] for stage in range(2)]
    assert len({*own[0], *own[1]}) == 2 * len(Kind)
    monkeypatch.setattr(Kind.BACKWARD, "place", 2)
    with pytest.raises(ScheduleError, match=r"^1f1b: no part of a program is what B \(backward\) runs;"):
        program.table()


@pytest.mark.parametrize(
    ("made_by", "lacks"),
    [
        ("nowhere.halves", r"of which there is no file nowhere\.py in distsim/program/passes"),
        ("backward_halves.nothing", "which has no function 'nothing'"),
        ("backward_halves", "which has no function ''"),
    ],
)
def test_what_makes_no_blocks_is_named_with_its_kinds(made_by, lacks, monkeypatch):
    for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        monkeypatch.setattr(kind, "runs", Runs(made_by))
    program, _ = timed_program(one_f_one_b(2, 1))
    said = (
        rf"what I \(.*\) and W \(.*\) runs is made by '{made_by}' of distsim\.program\.passes\..*, {lacks};"
    )
    with pytest.raises(ScheduleError, match=said):
        program.parts.part(0, Kind.BACKWARD_INPUT)


def test_actions_read_what_is_there_and_make_what_they_stand_for():
    """What kinds run is checked when it is made: what nobody makes would be there from the start."""
    program, _ = timed_program(one_f_one_b(2, 1))
    (forward, backward), (half, rest) = program.parts.made_by("")[0], program.parts.halves[0]

    def refused(match: str, first: Block, second: Block) -> None:
        own = ((first, second), *program.parts.halves[1:])
        with pytest.raises(IRError, match=match):
            _ = replace(program.parts, given={HALVES.made_by: own}).halves

    refused(r"^1f1b: W0@0 reads 'pending0', which nothing that it waits for makes;", backward, rest)
    refused(
        r"^1f1b: I0@0 reads 'sum0', which nothing",
        replace(half, inputs=(*half.inputs[:1], *rest.outputs)),
        rest,
    )
    refused(
        r"^1f1b: W0@0 makes 'x', which is made elsewhere",
        half,
        replace(rest, outputs=forward.inputs, accumulated=(), accumulating=None),
    )
    refused("^1f1b: I0@0 and W0@0 make no 'sum0', which the backward pass makes", half, half)


def test_a_kind_makes_again_what_it_waits_for_but_no_sum():
    key, name = Value("x", Float32()), "mine"
    both = "F0@0 makes 'x', and so does B \\(backward\\) of its stage, before or after it; let its kind wait"
    with pytest.raises(IRError, match=both):
        made = {key: Maker(1, 0, Kind.BACKWARD, False)}
        verify_actions(name, [Row(0, Kind.FORWARD, (), (key,))], (), made)
    with pytest.raises(IRError, match="B0@0 makes 'x' again, the sum over microbatches to which F"):
        made = {key: Maker(0, 0, Kind.FORWARD, True)}
        verify_actions(name, [Row(0, Kind.BACKWARD, (), (key,))], (), made)


def test_what_knows_some_kinds_refuses_the_others_by_name(monkeypatch):
    """Torch's tables, and the times by which stages are balanced."""
    made = one_f_one_b(1, 1)
    monkeypatch.setattr(torch_csv, "_LETTERS", "FIW")
    with pytest.raises(ScheduleError, match=r"^1f1b: torch's tables have no B \(backward\), as of B0@0"):
        write_csv(made)
    without = np.where(np.arange(CODES) == Kind.BACKWARD.code, -1, tables._PHASE_OF)
    monkeypatch.setattr(tables, "_PHASE_OF", without)
    with pytest.raises(ScheduleError, match=r"^1f1b runs B \(backward\), and stages are balanced by"):
        tables.order_of(made)
    plan = "pp=2,microbatches=2,stages=auto"  # which falls back on others where no split fits
    with pytest.raises(PlanError, match="runs B .* give stages by their sizes"):
        simulate("gpt:layers=8,hidden=32,heads=2,seq=16,vocab=64", "dgx-a100", plan, batch=2)


def test_the_shortest_way_that_has_what_is_listed_says_what_is_missing():
    for several in (kinds for count in range(5) for kinds in combinations(Kind, count)):
        letters = {kind.value for kind in several}
        ways = [[kind.value for kind in way_of(sum(kind.bit for kind in several))]]
        assert ways == ([[*way] for way in sorted(WAYS, key=len) if letters <= {*way}] or [[]])[:1]


def test_a_kind_that_integers_do_not_tell_apart_is_refused():
    """The last code is that of -1, of no action."""
    made = dict(Kind._member_map_)
    try:
        said = f"is number {NO_KIND}, and the integers of a schedule tell {NO_KIND} kinds"
        known = {UPDATE_LETTER, *[kind.value for kind in Kind]}
        with pytest.raises(ScheduleError, match=said):
            for letter in sorted({*ascii_uppercase} - known):
                line = letter, "another", "#000000", InFlight(), WaitsFor()
                Kind._member_map_[letter] = Kind._new_member_(Kind, *line)
        assert len(Kind._member_map_) == NO_KIND
    finally:
        Kind._member_map_.clear()
        Kind._member_map_.update(made)


ROOT = Path(__file__).parents[1]
CODED = re.compile(r"\b(code|codes|family|families)\b")
LITERALS = {
    **dict.fromkeys([ast.Mod, ast.FloorDiv, ast.Mult], (4, 8, 16, 32)),
    ast.BitAnd: (3, 7),
    **dict.fromkeys([ast.RShift, ast.LShift], (2, 3)),
}


def taken_apart(source: str, every: bool) -> list[str]:
    """Where numbers of two or three bits take integers apart, or make them; not ``every``: codes by name."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            one, two = node.left, node.right
            swapped = isinstance(node.op, ast.Mult) and isinstance(one, ast.Constant)
            of, by = (two, one) if swapped else (one, two)
            literal = isinstance(by, ast.Constant) and by.value in LITERALS.get(type(node.op), ())
            if literal and (every or CODED.search(ast.unparse(of))):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("source", ["code % 4", "family // 16", "codes[0] & 3", "code >> 3", "8 * family"])
def test_a_literal_that_takes_a_code_apart_is_seen(source):
    assert taken_apart(source, every=True) == taken_apart(source, every=False) == [source]
    other = re.sub("code|codes|family", "x", source)
    assert taken_apart(other, every=True) == [other] and not taken_apart(other, every=False)


@pytest.mark.parametrize("folder", ["distsim", "tests", "experiments"])
def test_one_place_knows_how_integers_code_actions(folder):
    """In the schedules nothing is counted by four or eight; in what knows of them no code is."""
    found: list[str] = []
    for path in (ROOT / folder).rglob("*.py"):
        source, inside = path.read_text(encoding="utf-8"), "distsim/schedule/" in path.as_posix()
        if inside or "from distsim.schedule" in source:
            found += [f"{path.relative_to(ROOT)}: {text}" for text in taken_apart(source, inside)]
    assert not found, "these go through distsim/schedule/codes.py"
