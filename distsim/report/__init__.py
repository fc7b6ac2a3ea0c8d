"""What people look at: a summary, a timeline, memory, an explanation, a schedule, a trace for Perfetto."""

from distsim.report.explanation import plot_explanation
from distsim.report.schedule_picture import plot_schedule
from distsim.report.schedule_table import describe_schedule
from distsim.report.summary import summarize
from distsim.report.timeline import plot_timeline
from distsim.report.trace import write_trace

__all__ = [
    "describe_schedule",
    "plot_explanation",
    "plot_schedule",
    "plot_timeline",
    "summarize",
    "write_trace",
]
