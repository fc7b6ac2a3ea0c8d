"""What people look at: a summary, a timeline, memory over time, an explanation, a trace for Perfetto."""

from distsim.report.explanation import plot_explanation
from distsim.report.memory import plot_memory
from distsim.report.summary import summarize
from distsim.report.timeline import plot_timeline
from distsim.report.trace import write_trace

__all__ = ["plot_explanation", "plot_memory", "plot_timeline", "summarize", "write_trace"]
