"""Measured truth: rows of published training steps as what distsim takes, predicted and compared."""

from distsim.truth.accuracy import Accuracy
from distsim.truth.case import Case, case_of
from distsim.truth.evaluation import Outcome, evaluated
from distsim.truth.picture import accuracy_figure, plot_accuracy
from distsim.truth.prediction import PredictedStep, predict, shown_peak
from distsim.truth.row import MissingFeatureError, Row, published_rows, read_rows

__all__ = [
    "Accuracy",
    "Case",
    "MissingFeatureError",
    "Outcome",
    "PredictedStep",
    "Row",
    "accuracy_figure",
    "case_of",
    "evaluated",
    "plot_accuracy",
    "predict",
    "published_rows",
    "read_rows",
    "shown_peak",
]
