"""Pipeline schedules: the order in which each rank runs (phase, stage, microbatch)."""

from distsim.schedule.generate import SCHEDULES, gpipe, one_f_one_b, schedule
from distsim.schedule.rounds import Rounds
from distsim.schedule.table import Schedule
from distsim.schedule.task import Phase, Task

__all__ = ["SCHEDULES", "Phase", "Rounds", "Schedule", "Task", "gpipe", "one_f_one_b", "schedule"]
