"""Pipeline schedules: the order in which each rank runs (phase, stage, microbatch)."""

from distsim.schedule.generate import SCHEDULES, gpipe, one_f_one_b, schedule
from distsim.schedule.task import Phase, Schedule, Task

__all__ = ["SCHEDULES", "Phase", "Schedule", "Task", "gpipe", "one_f_one_b", "schedule"]
