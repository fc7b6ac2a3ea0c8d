"""What failures cost: how often to write checkpoints, and the share of the time that is progress.

Failures come at random (an exponential distribution) with a mean time M between them, also while a checkpoint
is written, for which delta seconds pass, and while the training is restarted, R seconds. After one, all since
the last checkpoint is done anew.

- Young, "A first order approximation to the optimum checkpoint interval" (1974): compute for
  sqrt(2 delta M) between two checkpoints;
- Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006): for
  sqrt(2 delta M) (1 + 1/3 sqrt(delta / 2M) + 1/9 delta / 2M) - delta, or M where delta is 2M or more; and by
  his equation 20, work of T seconds with tau of them between two checkpoints takes
  M exp(R/M) (exp((tau + delta)/M) - 1) T / tau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distsim.hardware.units import HOUR

FAILURES = 419 / (54 * 24 * 16384)
"""Failures of a GPU-hour: 419 unexpected interruptions of 16,384 H100 in 54 days (The Llama 3 Herd of Models,
2024, section 3.3.4)."""

STORAGE = 2e12 / 16384
"""Bytes a second that a GPU writes: 2 TB/s that the storage of 16,384 GPUs sustains (The Llama 3 Herd of
Models, section 3.3.1)."""

RESTART = 600.0
"""Seconds from a failure to the next step: less than ten minutes to detect it and to test the machines, on
average (MegaScale, Jiang et al. 2024, section 6.3; from memory, not re-read)."""


def young_interval(between: float, write: float) -> float:
    """Return the seconds of work between checkpoints, to first order, of M and delta.

    >>> young_interval(3600.0, 18.0)
    360.0
    """
    return math.sqrt(2 * write * between)


def daly_interval(between: float, write: float) -> float:
    """Return the seconds of work between checkpoints, to higher order, of M and delta.

    >>> round(daly_interval(3600.0, 18.0), 2)
    348.1
    """
    if write >= 2 * between:
        return between
    part = write / (2 * between)
    return math.sqrt(2 * write * between) * (1 + math.sqrt(part) / 3 + part / 9) - write


def progress_share(between: float, write: float, restart: float, interval: float) -> float:
    """Return the share of the time that is progress, of M, delta, R and tau.

    >>> round(progress_share(3600.0, 18.0, 0.0, 360.0), 3)
    0.903
    """
    if math.isinf(between):
        return interval / (interval + write)
    stretch = (interval + write) / between
    if stretch + restart / between > 700:  # exp() ends there; so does the training
        return 0.0
    return interval / (between * math.exp(restart / between) * math.expm1(stretch))


@dataclass(frozen=True)
class Reliability:
    """How machines fail and recover: failures of a device-hour, bytes/s to storage of a device, seconds.

    Without failures no checkpoint is written.
    """

    failures: float = FAILURES
    storage: float = STORAGE
    restart: float = RESTART

    def goodput(self, devices: int, checkpoint: int) -> Goodput:
        """Return what so many devices lose that write, or read to restart, ``checkpoint`` bytes in all."""
        between = HOUR / (self.failures * devices) if self.failures else math.inf
        write = checkpoint / (self.storage * devices)
        return Goodput(between, checkpoint, write, self.restart + write)


@dataclass(frozen=True)
class Goodput:
    """The share of the time that is progress: seconds between failures, to write a checkpoint, to restart.

    Training waits while a checkpoint is written: what is written behind the next steps loses less.
    """

    between: float
    checkpoint: int
    write: float
    restart: float

    @property
    def young(self) -> float:
        """Seconds between checkpoints to first order; infinite without failures."""
        return young_interval(self.between, self.write)

    @property
    def interval(self) -> float:
        """Seconds between checkpoints to higher order, by which the share is; infinite without failures."""
        return math.inf if math.isinf(self.between) else daly_interval(self.between, self.write)

    @property
    def share(self) -> float:
        """The share of the time that is progress: 1 without failures."""
        if math.isinf(self.between):
            return 1.0
        if not self.write:  # checkpoints cost nothing, so nothing is done anew
            return math.exp(-self.restart / self.between)
        return progress_share(self.between, self.write, self.restart, self.interval)
