"""Llama 3 405B on 16,384 H100: how long one simulation takes, and how much memory.

``python experiments/large_cluster.py`` writes ``results/large_cluster.csv``: 126 layers, 16384 wide, 128
heads that share 8 keys and values, feed-forwards of 53248, 8192 tokens, vocabulary 128256, bfloat16, Adam, on
2048 DGX H100, dp=128, tp=8, pp=16, 1F1B, 16 sequences per replica. ``--small``: a narrow model on 64 devices.

Measured in a process of its own, in CPU seconds (``process_time``) without imports and Numba's compilation:
the topology; the model; ``cold`` (``parallelize``, ``simulate``, step time) and ``cold_memory`` (peak of
every stage) once; ``warm`` and ``warm_memory``, Program and all again, best and median of many; the end of
one device; and its shares, for which its calls are expanded. ``max_rss`` is the most memory that the process,
with Python, NumPy, Numba and the compiled code, ever held (``getrusage``).
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import common

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulation, Simulator
from distsim.hardware import load_cluster
from distsim.ir.type import BFloat16
from distsim.models import llama
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate

TRIALS = 100
LLAMA3 = {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, "seq": 8192, "vocab": 128256}
NARROW = {"layers": 14, "hidden": 256, "heads": 16, "ffn": 512, "seq": 128, "vocab": 1024}


def main() -> None:
    """Measure in a fresh process, write the table, print it."""
    given = common.options(__doc__)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh) as one:
        row = one.submit(measure, given.small).result()
    common.write_csv(given.out / "large_cluster.csv", [row])
    for name, value in row.items():
        print(f"{name:24} {value if isinstance(value, str) else format(value, ',.6g')}")


def measure(small: bool) -> dict[str, Any]:
    """The row of the table."""
    plan, cluster = (Plan(8, 2, 4, 16), "dgx-h100:8") if small else (Plan(128, 8, 16, 16), "dgx-h100:2048")
    sizes = NARROW if small else LLAMA3
    batch = plan.dp * plan.microbatches
    topology, topology_s = common.cpu_seconds(lambda: load_cluster(cluster))
    common.warm_up(topology)
    function, model_s = common.cpu_seconds(
        lambda: differentiate(llama(**sizes, kv_heads=8, batch=batch, dtype=BFloat16()), Adam())
    )
    simulator = Simulator(CostModel(topology))

    def simulate() -> tuple[Program, Simulation]:
        program = parallelize(function, plan, topology)
        simulation = simulator.simulate(program)
        if not simulation.step_time > 0:
            raise RuntimeError(f"{simulation.name} takes no time")
        return program, simulation

    (program, simulation), cold_s = common.cpu_seconds(simulate)
    peaks, cold_memory_s = common.cpu_seconds(lambda: program_memory(program).peaks)
    warm = [common.cpu_seconds(simulate) for _ in range(TRIALS)]
    memory = [common.cpu_seconds(lambda p=made: program_memory(p).peaks)[1] for (made, _), _ in warm]
    seconds = [took for _, took in warm]
    device = topology.devices[plan.devices // 3]
    end, timestamp_s = common.cpu_seconds(lambda: simulation.timestamps[device])
    shares, shares_s = common.cpu_seconds(lambda: simulation.shares(device))
    return {
        "plan": str(plan),
        "devices": plan.devices,
        "ops": len(simulation.timeline),
        "step_time_s": simulation.step_time,
        "peak_memory_bytes": max(peaks),
        "topology_s": topology_s,
        "model_s": model_s,
        "cold_s": cold_s,
        "cold_memory_s": cold_memory_s,
        "warm_s": min(seconds),
        "warm_s_median": statistics.median(seconds),
        "warm_memory_s": min(memory),
        "warm_memory_s_median": statistics.median(memory),
        "device": str(device),
        "end_of_device_s": end,
        "busy_of_device_s": shares.busy,
        "timestamp_s": timestamp_s,
        "shares_s": shares_s,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
