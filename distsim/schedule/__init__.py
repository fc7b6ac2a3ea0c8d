"""Pipeline schedules: the order in which each rank runs its actions (kind, stage, microbatch).

What a rank does at a time is a ``Cell``, an action or two that overlap:

>>> cell: Cell = (Action(Kind.FORWARD, 0, 0),)
>>> str(cell[0])
'F0@0'
"""

from distsim.schedule.action import LETTERS, Action, Cell, Kind
from distsim.schedule.catalogue import (
    SCHEDULES,
    TABLE,
    Generator,
    example,
    longer,
    register_schedule,
    schedule,
)
from distsim.schedule.issue_order import LAST, LATER, IssueOrder, issue_order
from distsim.schedule.table import Schedule
from distsim.schedule.torch_csv import read_csv, write_csv
from distsim.schedule.warm_up import WarmUp, ahead_by, gpipe, one_f_one_b, warm_up_schedule
from distsim.schedule.weights import FLUSH, Weights

__all__ = [
    "FLUSH",
    "LAST",
    "LATER",
    "LETTERS",
    "SCHEDULES",
    "TABLE",
    "Action",
    "Cell",
    "Generator",
    "IssueOrder",
    "Kind",
    "Schedule",
    "WarmUp",
    "Weights",
    "ahead_by",
    "example",
    "gpipe",
    "issue_order",
    "longer",
    "one_f_one_b",
    "read_csv",
    "register_schedule",
    "schedule",
    "warm_up_schedule",
    "write_csv",
]
