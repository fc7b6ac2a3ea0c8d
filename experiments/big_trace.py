"""Writing the trace of a Program with more than ten million events: how fast, in how much memory.

A GPT of 32 layers on 8 stages of 8 devices, up to 512 microbatches, every device in the trace, one
process per size. ``--small``: 4 and 12 microbatches.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

from distsim.compose import parallelize
from distsim.executor import Simulator
from distsim.executor.cost_model import CostModel
from distsim.hardware import load_cluster
from distsim.models import gpt
from distsim.plan import Plan
from distsim.report import write_trace
from distsim.transforms import Adam, differentiate

MICROBATCHES = (32, 128, 512)


def main() -> None:
    """Write every trace in a process of its own, then the table."""
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        one(int(sys.argv[2]))
        return
    given = common.options(__doc__)
    rows = []
    for count in common.progress((4, 12) if given.small else MICROBATCHES):
        command = [sys.executable, __file__, "--one", str(count)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        names = ("microbatches", "events", "bytes", "cpu_s", "peak_rss_before_mib", "peak_rss_mib")
        figures = map(float, result.stdout.split())
        rows.append(dict(zip(names, figures, strict=True)))
    common.write_csv(given.out / "big_trace.csv", rows)
    for row in rows:
        print(
            f"{row['events']:,.0f} events, {row['bytes'] / 1e9:.2f} GB in {row['cpu_s']:.1f} CPU s: "
            f"{row['events'] / row['cpu_s']:,.0f} events/s; peak memory {row['peak_rss_mib']:,.0f} MiB, "
            f"{row['peak_rss_before_mib']:,.0f} of them before the first event"
        )


def one(microbatches: int) -> None:
    """Simulate and write one trace; print the figures."""
    topology = load_cluster("dgx-a100:8")
    model = gpt(layers=32, hidden=1024, heads=16, seq=256, batch=2 * microbatches, vocab=1000)
    plan = Plan.parse(f"dp=2,tp=4,pp=8,microbatches={microbatches}")
    program = parallelize(differentiate(model, Adam()), plan, topology)
    simulation = Simulator(CostModel(topology)).simulate(program)
    before = peak()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        start = time.process_time()
        write_trace(simulation, path)
        seconds = time.process_time() - start
        size = os.path.getsize(path)
        with path.open("rb") as file:
            events = sum(line.startswith(b'{"ph":') or line.startswith(b'{"name":') for line in file)
    print(microbatches, events, size, seconds, before, peak())


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
