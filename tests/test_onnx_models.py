"""Real ONNX models: imported, differentiated, simulated under plans; which rules their operators have."""

import difflib
import os
from functools import cache
from pathlib import Path

import onnx
import pytest
from onnx_cases import (
    LEARNING_RATE,
    running_statistics,
)
from training_models import plans, refuses

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, Simulator, count_flops
from distsim.hardware import load_cluster
from distsim.importer import import_from_onnx
from distsim.ir import Function, Role, all_ops, verify
from distsim.ops import operator
from distsim.plan import Plan
from distsim.transforms import SGD, add_loss, differentiate, steady_state_transform

DATA = Path(__file__).parent / "data"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
REFERENCE = Path(os.environ.get("DISTSIM_REFERENCE", "/nonexistent")) / "onnx"
PACKAGED = {
    **{path.stem.removeprefix("light_"): path for path in sorted(LIGHT.glob("light_*.onnx"))},
    "gpt2": Path(__file__).parents[1] / "distsim" / "models" / "data" / "gpt2.onnx",
    "mlp": DATA / "mlp.onnx",
}
OTHERS = {f"reference {path.stem}": path for path in sorted(REFERENCE.glob("*.onnx"))}
FILES = PACKAGED | OTHERS
SIZES = {"gpt2": {"batch": 8, "seq": 64}, "reference gpt2-dynamic": {"batch": 8, "seq": 64}}
SIZES["reference mixer-dynamic-op18"] = {"batch": 4}
FOUR = ("gptneox-op23", "qwen3-op18", "mixer-dynamic-op18")
BATCH = dict.fromkeys(FILES, 1) | {"gpt2": 8, "mlp": 32}
BATCH |= {"reference gpt2-dynamic": 8, "reference gpt2-forward-backward": 2, "reference mlp": 32}
BATCH |= {f"reference {name}": 4 for name in FOUR if f"reference {name}" in FILES}
TOPOLOGY = load_cluster("dgx-a100")
COST_MODEL = CostModel(TOPOLOGY, strict=True)


@cache
def forward(name: str) -> Function:
    parameters = ("p_*",) if name.endswith("forward-backward") else ()
    return import_from_onnx(FILES[name], parameters=parameters, **SIZES.get(name, {}))


@cache
def training(name: str) -> Function:
    """The joint function; an export with a backward pass of its own is one as it is."""
    if name.endswith("forward-backward"):
        return forward(name)
    return differentiate(add_loss(forward(name)), SGD(LEARNING_RATE))


# --- what is imported -----------------------------------------------------------------------------


def test_the_nine_models_of_the_onnx_package_are_there():
    expected = (
        "bvlc_alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 zfnet512"
    )
    assert list(PACKAGED)[:-2] == expected.split()


@pytest.mark.parametrize("name", FILES)
def test_imports_and_differentiates_to_correct_ir(name):
    function, joint = forward(name), training(name)
    verify(function)
    verify(joint)
    sizes = {value.type.shape[0] for value in function.inputs_with(Role.INPUT)}
    assert BATCH[name] in sizes
    if joint is function:
        return
    loss, *new = joint.outputs
    assert loss.type.shape == ()
    trained = [v for v in function.parameters if v not in running_statistics(function)]
    assert [(v.name, v.type) for v in new] == [(f"{v.name}.new", v.type) for v in trained]


@pytest.mark.parametrize("name", [name for name in FILES if "gpt2" in name])
def test_no_shape_arithmetic_is_left_in_gpt2(name):
    function = training(name)
    shape_ops = {"Shape", "Size", "Range", "ConstantOfShape", "NonZero"}
    assert not shape_ops & {op.op_type for op in all_ops(function)}
    if not name.endswith("forward-backward"):  # this one counts the labels that are not padding
        scalars = [v for op in forward(name).ops for v in op.outputs if v.type.rank == 0]
        assert not [v for v in scalars if not v.type.dtype.is_floating], "a size that is computed"


# --- every plan that divides the batch ------------------------------------------------------------

# Of the reference exports, which are not everywhere, some plans.
SOME = {
    **{name: (Plan(), Plan(tp=2), Plan(pp=3), Plan(tp=4, pp=2)) for name in OTHERS},
    "reference gpt2-dynamic": [Plan(dp=4, tp=2), Plan(dp=2, tp=2, pp=2, microbatches=4)],
    # Its loss divides by a count over the batch that backward reads: no microbatches.
    "reference gpt2-forward-backward": [Plan(), Plan(dp=2, tp=2, pp=2), Plan(tp=2, pp=4)],
    "reference mlp": [Plan(dp=2, tp=2, pp=2, microbatches=2), Plan(dp=8, microbatches=4)],
}
MICROBATCHES = {"gpt2": (1, 4), "mlp": (1, 4, 32)}
# Of the nine models of the onnx package each has one device and a ninth of the others, a plan one model; of
# gpt2 it is a sixth, of the small one every plan.
NINE = [name for name in PACKAGED if name not in ("gpt2", "mlp")]


def plans_of(name: str) -> tuple[Plan, ...] | list[Plan]:
    if name in SOME:
        return SOME[name]
    counts = MICROBATCHES.get(name) or tuple(m for m in (1, 2, 4, 8, 16, 32) if BATCH[name] % m == 0)
    every = [plan for plan in plans(BATCH[name], microbatches=counts) if plan.schedule == "1f1b"]
    if name == "gpt2":
        return every[::6]
    return [Plan(), *every[1 + NINE.index(name) :: 9]] if name in NINE else every


CASES = [(name, plan) for name in FILES for plan in plans_of(name)]


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_simulates_under_a_plan(name, plan):
    joint = training(name)
    if refuses(joint, plan.tp):
        with pytest.raises(PlanError, match=f"tp={plan.tp} divides no matrix product"):
            parallelize(joint, plan, TOPOLOGY)
        return
    program = parallelize(joint, plan, TOPOLOGY)
    step, inputs = steady_state_transform(program.to_function())
    verify(step)
    simulation = Simulator(COST_MODEL).interpret(step, inputs)
    assert simulation.step_time > 0
    assert list(simulation.timestamps) == TOPOLOGY.devices[: plan.devices]
    for device in simulation.timestamps:
        shares = simulation.shares(device)
        parts = (shares.busy, shares.exposed_communication, shares.bubble)
        assert shares.busy > 0 and min(parts) > -1e-12
        assert sum(parts) == pytest.approx(simulation.step_time, rel=1e-9)
        assert simulation.peak_memory[device] > 0
    # Nothing of the model is lost: all devices together do at least its work.
    assert simulation.flops >= count_flops(joint) * (1 - 1e-9)
    if plan.devices == plan.microbatches == 1:
        assert simulation.shares(TOPOLOGY.devices[0]).exposed_communication == 0
        assert simulation.flops == pytest.approx(count_flops(joint), rel=1e-9)


@pytest.mark.parametrize("name", FILES)
def test_a_plan_that_does_not_divide_the_batch_is_refused_with_the_numbers(name):
    batch = BATCH[name]
    divisors = ", ".join(str(d) for d in range(1, batch + 1) if batch % d == 0)
    refused = [(dp, m) for dp in range(1, 9) for m in (1, 2, 3, 5) if batch % (dp * m)]
    assert len(refused) >= 8
    for dp, m in refused:
        with pytest.raises(PlanError) as caught:
            parallelize(training(name), Plan(dp=dp, microbatches=m), TOPOLOGY)
        text = str(caught.value)
        assert text.startswith(f"dp={dp} times microbatches={m} does not divide the batch of {batch} ")
        assert text.endswith(f"must be one of {divisors}")


# --- which rules the operators of these models have -----------------------------------------------

GOLDEN = DATA / "op_coverage.txt"
RULES = ("types", "meaning", "work", "gradient", "sharding")
HEADER = " ".join(
    f"{title:<22}" if i == 0 else f"{title:<10}" for i, title in enumerate(["op", *RULES, "in"])
)


def row(op_type: str, where: str) -> str:
    """One line of the table: where each rule comes from (``onnx``: the onnx package's own)."""
    known = operator(op_type)
    cells = [
        "own" if known.types else "onnx",
        "own" if known.compute else "onnx",
        "own" if known.work else "-",
        "own" if known.gradient else "-",
        "own" if known.sharding else "-",
        where,
    ]
    return " ".join([f"{op_type:<22}", *(f"{cell:<10}" for cell in cells)]).rstrip()


def found_in(files: dict) -> dict[str, str]:
    """Each op type of these models -> whether a model has it, or only its training step."""
    found = {op.op_type: "training" for name in files for op in all_ops(training(name))}
    return found | {op.op_type: "model" for name in files for op in all_ops(forward(name))}


def golden_rows() -> list[str]:
    return [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")][1:]


def coverage() -> list[str]:
    """The table as it is now; without the reference exports their lines are taken as still needed."""
    where = {op_type: f"reference {kind}" for op_type, kind in found_in(OTHERS).items()}
    if not OTHERS:
        listed = [line.split() for line in golden_rows()]
        where = {cells[0]: " ".join(cells[6:]) for cells in listed if cells[6] == "reference"}
    where |= found_in(PACKAGED)
    return [row(op_type, where[op_type]) for op_type in sorted(where)]


def test_rules_of_the_operators_are_those_of_the_table():
    difference = difflib.unified_diff(
        golden_rows(), coverage(), "tests/data/op_coverage.txt", "now", "", "", 0
    )
    text = "\n".join(difference)
    assert not text, f"rules have changed; if that is right, change the table:\n{HEADER}\n{text}"


def test_every_operator_has_work_and_sharding():
    for line in golden_rows():
        op_type = line.split()[0]
        assert operator(op_type).work, f"{op_type} has no work rule"
        assert operator(op_type).sharding, f"{op_type} has no sharding rule"


@pytest.mark.parametrize("name", FILES)
def test_every_operator_on_reals_has_a_gradient(name):
    def real(values):
        return any(value.type.dtype.is_floating for value in values)

    types = {op.op_type for op in all_ops(forward(name)) if real(op.inputs) and real(op.outputs)}
    assert types, "a model without operators on reals"
    assert [op_type for op_type in sorted(types) if operator(op_type).gradient is None] == []
