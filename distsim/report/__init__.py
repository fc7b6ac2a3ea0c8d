"""What people look at: a text summary, a timeline, an explanation, a trace for Perfetto."""

from distsim.report.explanation import plot_explanation
from distsim.report.summary import summarize
from distsim.report.timeline import plot_timeline
from distsim.report.trace import write_trace

__all__ = ["plot_explanation", "plot_timeline", "summarize", "write_trace"]
