"""The names that packages hand on, and what importing distsim loads."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What the DistIR notebooks import, and the nouns that this library adds.
PUBLIC_NAMES = {
    "distsim.ir": [
        "Device",
        "FunctionMaker",
        "Topology",
        "Value",
        "cpprint",
        "pformat",
        "Function",
        "Mesh",
        "Op",
    ],
    "distsim.ir.type": ["Bool", "Float", "Int64", "Tensor"],
    "distsim.importer": ["import_from_hf", "import_from_onnx", "model_names", "parse_tensor_from_file"],
    "distsim.executor": ["Disturbances", "Explanation", "SequentialExecutor", "Simulator", "infer_types"],
    "distsim.executor.cost_model": ["CostModel"],
    "distsim.transforms": [
        "PipeDreamScheduler",
        "block_costs",
        "parallel_transform_3d",
        "rematerialize",
        "split_joint",
        "steady_state_transform",
    ],
    "distsim.schedule": [
        "FLUSH",
        "SCHEDULES",
        "Action",
        "Cell",
        "Generator",
        "Kind",
        "Schedule",
        "Weights",
        "gpipe",
        "one_f_one_b",
        "read_csv",
        "register_schedule",
        "schedule",
        "write_csv",
    ],
    "distsim.plan": ["Plan"],
    "distsim.compose": ["build_program", "parallelize"],
    "distsim.program": ["Program"],
    "distsim.interpret": ["SequentialExecutor", "count_flops", "count_model_flops", "infer_types"],
    "distsim.cost": ["CostModel"],
    "distsim.simulation": ["Disturbances", "Explanation", "Simulation", "Simulator"],
    "distsim.device_placement": [
        "DagNode",
        "Item",
        "Part",
        "Partition",
        "PartitionDevice",
        "Problem",
        "add_op",
        "make_partition",
        "move_op",
        "partition",
        "place",
        "problem_of",
        "remove_op",
    ],
    "distsim.device_placement.optimal": ["optimal_partition"],
    "distsim.transforms.recompute.saves": ["JointGraph", "JointNode", "Tag"],
    "distsim.stage_balance": ["BlockCost", "Split", "auto_split", "default_split", "split_time"],
    "distsim.device_placement.partitioned": ["partition_model"],
    "distsim.hardware": ["collective_time", "load_cluster", "presets"],
    "distsim.models": ["Routing", "deepseek", "draw_routing", "gpt", "llama", "mlp", "moe"],
}


# Slow to import, or extras: imported by the functions that use them.
NOT_LOADED = ["matplotlib.pyplot", "numba", "onnxruntime", "onnxscript", "pandas"]


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names(module):
    loaded = importlib.import_module(module)
    missing = [name for name in PUBLIC_NAMES[module] if isinstance(getattr(loaded, name, sys), type(sys))]
    assert missing == []  # a submodule of the same name does not count
    offered = getattr(loaded, "__all__", PUBLIC_NAMES[module])
    assert [name for name in PUBLIC_NAMES[module] if name not in offered] == []
    assert [name for name in offered if not hasattr(loaded, name)] == []


def test_importing_distsim_loads_nothing_slow():
    code = f"import sys, distsim; print([name for name in {NOT_LOADED} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr, result.returncode) == ("[]\n", "", 0)


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_every_public_name_has_an_example(module):
    """In its docstring, in that of a member, or, of a class or an alias, in that of its package."""
    package = importlib.import_module(module)
    lacking: list[str] = []
    for name in PUBLIC_NAMES[module]:
        value = getattr(package, name)
        members = vars(value).values() if inspect.isclass(value) else ()
        texts = [inspect.getdoc(each) or "" for each in (value, *members)]
        texts += [] if inspect.isroutine(value) else [package.__doc__ or ""]
        if callable(value) and not any(">>>" in text for text in texts):
            lacking.append(name)
    assert lacking == []
