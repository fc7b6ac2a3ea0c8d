"""A user's own machine: timings of its kernels and collectives become the figures of a cluster's file."""

from distsim.calibration.fitting import Calibration, MeasuredFigure, calibrate, read_timings
from distsim.calibration.timings import Timing

__all__ = ["Calibration", "MeasuredFigure", "Timing", "calibrate", "read_timings"]
