"""Measured truth: rows of published training steps as what distsim takes, and what it predicts for them."""

from distsim.truth.case import Case, case_of
from distsim.truth.prediction import PredictedStep, predict, shown_peak
from distsim.truth.row import MissingFeatureError, Row, read_rows

__all__ = [
    "Case",
    "MissingFeatureError",
    "PredictedStep",
    "Row",
    "case_of",
    "predict",
    "read_rows",
    "shown_peak",
]
