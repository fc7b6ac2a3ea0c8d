"""Pipeline schedules: the order in which each rank runs its actions (kind, stage, microbatch)."""

from distsim.schedule.action import Action, Cell, Kind
from distsim.schedule.generate import SCHEDULES, gpipe, one_f_one_b, schedule
from distsim.schedule.issue_order import LAST, LATER, IssueOrder, issue_order
from distsim.schedule.refusals import WEIGHTS
from distsim.schedule.rounds import Rounds
from distsim.schedule.table import Schedule

__all__ = [
    "LAST",
    "LATER",
    "SCHEDULES",
    "WEIGHTS",
    "Action",
    "Cell",
    "IssueOrder",
    "Kind",
    "Rounds",
    "Schedule",
    "gpipe",
    "issue_order",
    "one_f_one_b",
    "schedule",
]
