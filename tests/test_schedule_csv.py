"""Schedules as torch's tables: read, written, and refused with the place of what is wrong."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.errors import ScheduleError
from distsim.schedule import Action, Kind, Schedule, read_csv, schedule, torch_csv, write_csv

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_cells_are_actions_and_gaps_mean_nothing():
    made = read_csv(GOOD, "mine")
    assert write_csv(made) == GOOD
    assert made == Schedule("mine", 2, 2, made.ranks, (0, 1))
    for same in ("0F0,0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n\r\n", "0F0, 0F1,0B0 ,0B1\n1F0,1B0,1F1,1B1"):
        assert read_csv(same, "mine") == made


def test_placement_comes_from_the_lines():
    made = read_csv("0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1B0")
    assert (made.name, made.rank_of, made.num_ranks, made.chunks) == ("table", (0, 1, 1, 0), 2, 2)


def test_pairs_and_copies():
    made = schedule("dualpipe", 4, 8)
    text = write_csv(made)
    assert "(0F3;7B1)OVERLAP_F_B" in text
    again = read_csv(text, "dualpipe", copies=2)
    assert again == made and again.num_microbatches == 4
    with pytest.raises(ScheduleError, match=r"deadlocks .* two copies of the model it runs.*--copies 2"):
        read_csv(text)  # as one chain, stage 4 would wait for stage 3
    with pytest.raises(ScheduleError, match="deadlocks") as raised:
        read_csv("0F0,0B0\n1B0,1F0")
    assert "copies" not in str(raised.value)
    odd = [[Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1)], []]
    odd[0] += [(Action(Kind.BACKWARD_INPUT, 0, 1), Action(Kind.BACKWARD_WEIGHT, 0, 0))]
    with pytest.raises(ScheduleError, match=r"torch's tables have no \(I1@0;W0@0\); overlap one F with"):
        write_csv(Schedule("odd", 1, 2, odd))


def test_a_file_is_named_by_its_path(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert read_csv(path) == read_csv(GOOD, "mine")
    with pytest.raises(ScheduleError, match="none.csv: cannot read .*none.csv: No such file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match="cannot read"):
        read_csv(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table: no actions; write a line per rank, with cells as 0F0"),
        (",,\n,\n", "no actions"),
        (
            "0F0,0B0\n1F0,1X0",
            "line 2, column 2: '1X0' is no action; write stage, F, B, I or W, and microbatch",
        ),
        ("0F0,0F\n", "line 1, column 2: '0F' is no action"),
        ("0F0,-1B0", "line 1, column 2: '-1B0' is no action"),
        ("0F0,0B12345678", "with up to 7 digits"),
        ("0F0,0B٣", "line 1, column 2: byte 0xd9 is no text"),
        ("0F0,0B0\n1F0,\x001B0", r"line 2, column 2: '\\x001B0' is no action"),
        ("schedule.csv", "'schedule.csv' is no action"),
        ("0F0," + "x" * 1000, "column 2: 'x{40}'... is no action"),
        ("0F0,0SEND_F0,0B0", "line 1, column 2: '0SEND_F0' is communication, which follows from the actions"),
        ("0UNSHARD,0F0,0B0,0RESHARD", "column 1: '0UNSHARD' is communication"),
        ("0F0,0B0,0REDUCE_GRAD", "column 3: '0REDUCE_GRAD' is communication, .*format=\"compute_only\""),
        ("0F0,0B0,0F0", "line 1, column 3: F0@0 stands in line 1, column 1 already; run each action once"),
        (
            "0F0,0B0\n0F1,0B1",
            "line 2, column 1: F1@0 is of stage 0, which line 1, column 1 has; a stage",
        ),
        ("0F0,0B0\n2F0,2B0", "table: stage 1 is on no rank, but stage 2 is; number stages without a gap"),
        ("0F0,0B0\n\n1F0,1B0", "table: rank 1 holds no stage; leave it out"),
        ("0F0,0B0,0F9999999", "missing F1@0, F2@0, F3@0, F4@0, F5@0 and 19999992 more"),
        ("0F0,9999999B0", "stage 1 is on no rank, but stage 9999999 is"),
        ("0F0\n", "missing B0@0"),
        ("0F0,0W0,0I0", "W0@0 waits for I0@0, which rank 0 runs after W0@0"),
        ("0F0,0B0,0I0,0W0", "lists both B0@0 and I0@0"),
        ("0B0,0F0", "deadlocks after 0 actions: B0@0 waits for F0@0"),
        (
            "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0B1;0B2)OVERLAP_F_B",
            r"column 4: \(B1@0;B2@0\) do not overlap",
        ),
        ("(0F0;0B0)OVERLAP_F_B", r"\(F0@0;B0@0\) waits for F0@0, which runs beside it"),
        ("(0F0;0F0)OVERLAP_F_B", r"\(F0@0;F0@0\) do not overlap"),
        ("(0F0;0B0)", "column 1: '.0F0;0B0.' is no action"),
        ("(0F0)OVERLAP_F_B", "is no action"),
        ('"0F0",0B0', "line 1, column 1: '\"0F0\"' is no action"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text, message):
    with pytest.raises(ScheduleError, match=message):
        read_csv(text)


def test_sizes_are_limited_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_csv, "MAX_BYTES", 64)
    (tmp_path / "long.csv").write_text("0F0," * 1000)
    for source in (tmp_path / "long.csv", "0F0," * 1000):
        with pytest.raises(ScheduleError, match="over 64 bytes; give a table of fewer microbatches"):
            read_csv(source)
    monkeypatch.setattr(torch_csv, "MAX_CELLS", 7)
    with pytest.raises(ScheduleError, match="8 cells, over 7"):
        read_csv(GOOD)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | st.text("0123FBIW,;()\n OVERLAP_SEND", max_size=60).map(str.encode))
def test_garbage_is_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "garbage.csv"
    path.write_bytes(raw)
    try:
        made = read_csv(path)
    except ScheduleError as error:
        assert re.match("garbage", str(error)) and len(str(error)) < 500
    else:
        assert read_csv(write_csv(made), "garbage") == made


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_table_is_refused_by_place_or_action(data):
    made = schedule(data.draw(st.sampled_from(["1f1b", "zb_h1", "zb_v", "dualpipe_v"])), 2, 4)
    text = write_csv(made)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from("019FBIWX,;()\n")) + text[at + 1 :]
    try:
        other = read_csv(damaged, made.name)
    except ScheduleError as error:
        assert re.search(r"line \d+, column \d+|[FBIW]\d+@\d+|rank \d|stage \d", str(error))
    else:
        assert read_csv(write_csv(other), made.name) == other
