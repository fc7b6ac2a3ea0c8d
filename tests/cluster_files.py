"""Clusters in files, and a step on them."""

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.models import gpt
from distsim.plan import Plan
from distsim.simulation import Simulator
from distsim.transforms import Adam, differentiate

FREE = ["nvlink.bandwidth=1000000TB/s", "nvlink.latency=0s", "infiniband.bandwidth=1000000TB/s"]
"""Links that take next to no time."""


def step(topology, plan: str = "dp=2", engine: str = "maxplus") -> float:
    joint = differentiate(gpt(4, 32, 2, 16, 8, 64), Adam())
    costs = CostModel(topology)
    program = parallelize(joint, Plan.parse(plan), topology, costs)
    return Simulator(costs, engine=engine).simulate(program).step_time


def write(tmp_path, text: str, base: str = "dgx-a100") -> str:
    path = tmp_path / "mine.toml"
    path.write_text((f'base = "{base}"\n' if base else "") + text)
    return str(path)
