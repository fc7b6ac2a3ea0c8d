"""What DistIR's notebook asks of the library: its names, its low-level calls, and its figures."""

import importlib
import re
from pathlib import Path

import pytest

from distsim.executor import Simulator, infer_types
from distsim.executor.cost_model import CostModel
from distsim.ir import FunctionMaker, Topology
from distsim.ir.type import Float, Tensor
from distsim.transforms import parallel_transform_3d, steady_state_transform

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(ROOT / "experiments"))
    common, distir_agreement, grid_search, notebook_cells = map(
        importlib.import_module, ("common", "distir_agreement", "grid_search", "notebook_cells")
    )
cells, run_cells = notebook_cells.cells, notebook_cells.run_cells
# The notebook itself, where a copy lies next to the repository.
NOTEBOOKS = sorted(ROOT.parent.glob("shared/seeds/001*"))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("distsim.importer", "import_from_onnx parse_tensor_from_file"),
        ("distsim.ir", "FunctionMaker cpprint pformat Device Topology Value"),
        ("distsim.executor", "infer_types SequentialExecutor Simulator"),
        ("distsim.executor.cost_model", "CostModel"),
        ("distsim.ir.type", "Bool Float Int64 Tensor"),
        ("distsim.transforms", "parallel_transform_3d steady_state_transform PipeDreamScheduler"),
    ],
)
def test_names_that_the_notebook_imports(module, names):
    loaded = importlib.import_module(module)
    assert [name for name in names.split() if not callable(getattr(loaded, name, None))] == []


def perceptron(layers, width, batch, device):
    """Forward, loss and backward in the order in which the notebook adds them; no optimizer."""
    maker = FunctionMaker(name="mlp")
    x = maker.add_input_value("x", Tensor(dtype=Float(), shape=(batch, width), device=device))
    z = maker.add_input_value("z", Tensor(dtype=Float(), shape=(batch, width), device=device))
    square = Tensor(dtype=Float(), shape=(width, width), device=device)
    weights = [maker.add_input_value(f"w{i}", square) for i in range(layers)]
    a = x
    for i, weight in enumerate(weights):
        y = maker.add_op("MatMul", inputs=[a, weight], output_names=[f"y{i}"])
        a = maker.add_op("Relu", inputs=[y], output_names=[f"a{i}"])
    maker.add_op("Loss", inputs=[a, z], attributes={"N": batch}, output_names=["l"])
    dy = maker.add_op("LossGrad", inputs=[a, z], attributes={"N": batch}, output_names=["dl"])
    for i in reversed(range(layers)):
        # The maker lists its ops while it is being filled; backward finds forward's values there.
        before_relu, before_matmul = maker.ops[2 * i + 1].inputs[0], maker.ops[2 * i].inputs[0]
        da = maker.add_op("ReluGrad", inputs=[before_relu, dy], output_names=[f"da{i}"])
        dy, _ = maker.add_op(
            "MatMulGrad", inputs=[before_matmul, weights[i], da], output_names=[f"dy{i}", f"dw{i}"]
        )
    return maker.finalize()


def test_the_maker_shows_its_ops_and_a_function_without_outputs_returns_what_nobody_reads():
    function = perceptron(3, 8, 16, None)
    assert [op.op_type for op in function.ops[:3]] == ["MatMul", "Relu", "MatMul"]
    assert {value.name for value in function.outputs} == {"l", "dy0", "dw0", "dw1", "dw2"}
    assert function.ops[8].op_type == "ReluGrad"
    assert function.ops[8].inputs[0].name == "y2"


def test_one_device_one_event_per_op():
    topology = Topology()
    device = topology.add_device("gpu")
    function = perceptron(5, 64, 32, device)
    assert infer_types(function, function.inputs) is function
    simulation = Simulator(CostModel(topology)).interpret(function, (v.type for v in function.inputs))
    assert len(simulation.trace) == len(function.ops) == 4 * 5 + 2
    assert list(simulation.timestamps) == [device]
    busy = sum(event["dur"] for event in simulation.trace)
    assert simulation.timestamps[device] == pytest.approx(busy) == pytest.approx(simulation.step_time)


def distributed(dp, hp, pp, microbatches, layers=4, width=64, batch=32):
    """The notebook's four calls: a first device holds the inputs, the others are the workers."""
    topology = Topology()
    holder = topology.add_device("gpu")
    function = perceptron(layers, width, batch, holder)
    for _ in range(dp * hp * pp):
        topology.add_device("gpu")
    devices = topology.devices
    for i, first in enumerate(devices):
        for second in devices[i + 1 :]:
            topology.set_bandwidth(first, second, 200)
    step = parallel_transform_3d(function, dp, hp, pp, topology.devices, microbatches)
    step, inputs = steady_state_transform(infer_types(step, step.inputs))
    step = infer_types(step, inputs)
    return devices, Simulator(CostModel(topology)).interpret(step, (v.type for v in step.inputs))


@pytest.mark.parametrize(
    ("degrees", "sends", "collectives"),
    [
        ((1, 1, 1, 1), False, False),
        ((4, 1, 1, 1), False, True),
        ((1, 4, 1, 1), False, True),
        ((1, 1, 4, 2), True, False),
        ((2, 2, 2, 4), True, True),
    ],
)
def test_the_inputs_device_stays_out_of_a_steady_step(degrees, sends, collectives):
    devices, simulation = distributed(*degrees)
    assert list(simulation.timestamps) == devices[1:]
    assert max(simulation.timestamps.values()) == simulation.step_time > 0
    names = {event["name"] for event in simulation.trace}
    assert ("Send" in names) == sends
    # The grid's gradients and horizontal sums are all-reduced; nothing is left to bring from the holder.
    assert ("MPIAllreduce" in names) == collectives == any("MPI" in name for name in names)
    assert not names & {"MPIBroadcast", "MPIScatter"}
    assert all(event["dur"] > 0 for event in simulation.trace if event["name"] in ("Send", "MPIAllreduce"))
    share = common.communication_share(simulation)
    assert 0 < share < 1 if sends or collectives else share == 0


def test_the_grid_is_the_notebooks():
    grid = common.layouts(16, 64, 8192)
    assert len(grid) == len(set(grid)) == 52
    assert all(layout.dp * layout.hp * layout.pp == 16 for layout in grid)
    # dp: the microbatches of a pipeline, k < floor(log2(8192 / dp) / 2); 4, 3, 2 and 1 pipeline depths.
    limits = {1: 32, 2: 32, 4: 16, 8: 16}
    assert {dp: max(g.microbatches for g in grid if g.dp == dp) for dp in limits} == limits
    assert [g for g in grid if g.pp == 1] == [common.Layout(d, 16 // d, 1, 1) for d in (1, 2, 4, 8, 16)]
    assert len(common.layouts(16, 4, 8192)) == 52 - 5 * 3  # without 1,1,16; 1,2,8 and 2,1,8


SMALLER = [
    # (what the notebook says, what is run here, how often it says so)
    (r"^all_num_hidden_layers = \[64\]", "all_num_hidden_layers = [4]", 1),
    (r"^all_num_hidden_layers = \[32,.*\]", "all_num_hidden_layers = [32, 64, 128]", 1),
    (r"^all_num_devices = .*", "all_num_devices = [2, 4, 8]", 3),
    (r"^all_batch_sizes = \[512,.*\]", "all_batch_sizes = [512, 1024]", 2),
    (r"^all_input_dims = .*", "all_input_dims = [1024, 2048]", 1),
    (r"^num_hidden_layers = .*", "num_hidden_layers = 8", 3),
]


@pytest.mark.skipif(not NOTEBOOKS, reason="the DistIR notebook is not next to the repository")
@pytest.mark.filterwarnings("ignore::UserWarning")  # matplotlib's, about the notebook's own layout
def test_the_notebook_itself_runs_with_fewer_layers_and_devices():
    """Reduced: 4 layers instead of 64 in the grid, up to 8 devices and 8 layers in the scaling curves."""
    code = cells(NOTEBOOKS[0].read_text(encoding="utf-8"))
    for pattern, replacement, times in SMALLER:
        changed = [re.subn(pattern, replacement, cell, flags=re.MULTILINE) for cell in code]
        assert sum(count for _, count in changed) == times, pattern
        code = [cell for cell, _ in changed]
    done = run_cells(code)
    assert done.configurations == len(common.layouts(16, 4, 8192))
    assert all(
        x > 0 for by_dp in done.variables["results"].values() for k in by_dp.values() for x in k.values()
    )
    assert set(done.figures) == {
        "grid_search.pdf",
        "simulator_scaling.pdf",
        "data_parallelism.pdf",
        "horizontal_parallelism.pdf",
        "pipeline_parallelism.pdf",
    }
    assert min(done.figures.values()) > 5000
    assert sorted(done.variables["all_simulation_times"]) == [4 * layers + 2 for layers in (32, 64, 128)]


def test_cells_are_cut_at_headings_and_lose_their_magics():
    text = "In [None]:\n%%time\nfrom dist_ir.ir import Device  # dist_ir\n\n## Part\n\nIn [None]:\n# x\ny = 1"
    assert cells(text) == ["from distsim.ir import Device  # distsim", "# x\ny = 1"]


def test_step_times_agree_with_distirs():
    """26 of the 52 layouts, all that were measured, at full size; DistIR's cost rules, nothing overlaps."""
    rows = distir_agreement.compare(common.read_csv(common.DATA / "distir_grid.csv"))
    assert len(rows) == 26
    assert {str(row): row["ratio"] for row in rows if distir_agreement.error(row) > 0.05} == {}
    assert distir_agreement.rank_correlation(rows) >= 0.98


@pytest.mark.parametrize("layout", [(16, 1, 1, 1), (8, 2, 1, 1), (8, 1, 2, 2), (1, 4, 4, 4)])
def test_the_notebooks_calls_and_a_plan_give_the_same_step(layout):
    topology = common.uniform_topology(16)
    function = common.joint_mlp(4, 512, 512, topology.devices[0], 0.01)
    layout = common.Layout(*layout)
    ways = (grid_search.by_parallelize, grid_search.by_notebook)
    planned, called = [way(function, layout, topology, CostModel(topology)) for way in ways]
    assert planned == pytest.approx(called, rel=1e-9)
