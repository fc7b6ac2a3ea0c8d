"""One cost model per run: what is given to a call decides wherever seconds are asked for."""

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

import pytest
from cli_cases import run
from training_models import Maker, flat_mlp, mesh_of, topology_of

from distsim.compose import build_program, parallelize
from distsim.device_placement import problem_of
from distsim.device_placement.partitioned import partition_model
from distsim.errors import CostError
from distsim.executor import CostModel, Simulator
from distsim.hardware import collective_time, load_cluster
from distsim.ir import Device
from distsim.models import gpt, mlp
from distsim.ops import register
from distsim.ops.operator import Operator
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, parallel_transform_3d, rematerialize

LAYERS = 8
PLAN = Plan(pp=2, microbatches=4)


@dataclass(frozen=True)
class Dear:
    """A second for the operator of one name, a millisecond for each other."""

    name: str

    def compute(self, signature, demand, device):
        return 1.0 if signature.op_type == self.name else 1e-3

    def communicate(self, kind, nbytes, group, topology):
        return collective_time(kind, nbytes, group, topology)


@cache
def joint():
    return differentiate(mlp(layers=LAYERS, width=64, batch=32), SGD())


@cache
def topology():
    return topology_of(2)


def matmuls(program):
    """The products of the layers in the forward pass of each stage."""
    counts = []
    for stage in program.stages:
        ops = [*stage.forward.function.ops]
        for op in ops:
            ops += op.callee.ops if op.is_call else ()
        counts.append(sum(op.op_type == "MatMul" for op in ops))
    return counts


def dear(name, of=None):
    return CostModel(of or topology(), rules=Dear(name))


LOSS = next(op.op_type for op in joint().ops if "Loss" in op.op_type)


# --- the stages of a pipeline ---------------------------------------------------------------------------


@pytest.mark.parametrize("stages", ["even", "auto"])
def test_rules_of_ones_own_move_the_cut(stages):
    plan = replace(PLAN, stages=stages)
    assert matmuls(parallelize(joint(), plan, topology())) == [LAYERS // 2] * 2
    assert matmuls(parallelize(joint(), plan, topology(), dear(LOSS))) == [LAYERS, 0]
    assert matmuls(parallelize(joint(), plan, topology())) == [LAYERS // 2] * 2  # nothing of it is left


def test_every_composition_takes_the_cost_model():
    mesh, own = mesh_of(1, 1, 2), dear(LOSS)
    assert matmuls(build_program(joint(), mesh, PLAN, own)) == [LAYERS, 0]
    step = parallel_transform_3d(joint(), 1, 1, 2, mesh.devices, 4, own)
    on_last = [
        op for op in step.ops if op.op_type == "MatMul" and op.inputs[0].type.device == mesh.devices[1]
    ]
    assert not on_last


def test_a_flat_function_is_cut_by_it_as_well():
    function = flat_mlp(layers=6)
    assert matmuls(parallelize(function, PLAN, topology())) == [4, 2]
    assert matmuls(parallelize(function, PLAN, topology(), dear("Loss"))) == [6, 0]


def test_the_auto_cut_is_that_of_the_rules_that_simulate_it():
    cluster = load_cluster("dgx-a100")
    for cost_model in (CostModel(cluster), CostModel.distir(cluster)):
        times = {
            stages: Simulator(cost_model)
            .simulate(parallelize(joint(), replace(PLAN, stages=stages), cluster, cost_model))
            .step_time
            for stages in ("even", "auto")
        }
        assert times["auto"] <= times["even"]


# --- what is kept ---------------------------------------------------------------------------------------


def test_equal_rules_share_a_cut_and_others_where_it_is_the_same():
    one, two = (parallelize(joint(), PLAN, topology(), CostModel(topology())) for _ in range(2))
    assert one.stages[0].forward is two.stages[0].forward
    own, same = (parallelize(joint(), PLAN, topology(), dear(LOSS)) for _ in range(2))
    assert own.stages[0].forward is same.stages[0].forward
    assert own.stages[0].forward is not one.stages[0].forward
    distir = parallelize(joint(), PLAN, topology(), CostModel.distir(topology()))
    assert (distir.parts is one.parts) == (matmuls(distir) == matmuls(one))
    assert matmuls(own) != matmuls(one)


class Halved(CostModel):
    """A model that finds seconds in its own way."""

    def seconds(self, signature, where):
        return Dear(LOSS).compute(signature, None, None) / 2


class Unhashable:
    __hash__ = None
    compute, communicate = Dear(LOSS).compute, Dear(LOSS).communicate


@pytest.mark.parametrize("make", [Halved, lambda t: CostModel(t, rules=Unhashable())])
def test_a_model_without_rules_to_compare_agrees_with_itself_only_and_is_let_go(make, collect):
    function = differentiate(mlp(layers=4, width=64, batch=32), SGD())
    own, other = make(topology()), make(topology())
    first, again = (parallelize(function, PLAN, topology(), own) for _ in range(2))
    assert first.stages[0].forward is again.stages[0].forward
    assert matmuls(first) == [4, 0]
    assert matmuls(parallelize(function, PLAN, topology(), other)) == [4, 0]
    gone = weakref.ref(own)
    del own, first, again
    collect()
    assert gone() is None


def test_a_cost_model_of_another_topology_is_refused():
    other = CostModel(topology_of(4))
    for call in (
        lambda: parallelize(joint(), PLAN, topology(), other),
        lambda: partition_model(mlp(2, 8, 4), topology(), "single", cost_model=other),
    ):
        with pytest.raises(CostError, match="of another topology, of 4 devices, than the one given, of 2"):
            call()


# --- strict, and costs that are none --------------------------------------------------------------------


register(Operator("TestUncosted", types=lambda a, x: (x[0],)))


def unknown():
    """A step with an operator that has no work rule."""
    function = flat_mlp(layers=3)
    first = function.ops[0]
    op = replace(first, op_type="TestUncosted", inputs=first.inputs[:1])
    return replace(function, ops=(op, *function.ops[1:]))


@pytest.mark.parametrize("stages", ["even", "auto"])
def test_a_strict_model_refuses_what_it_cannot_cost_when_stages_are_cut(stages):
    plan = Plan(pp=2, stages=stages)
    with pytest.raises(CostError, match="TestUncosted.* has no work rule"):
        parallelize(unknown(), plan, topology(), CostModel(topology(), strict=True))


@pytest.mark.parametrize("cost", [-1.0, float("nan"), None])
def test_a_model_that_gives_no_cost_is_refused_when_stages_are_cut(cost):
    broken = type("Broken", (CostModel,), {"seconds": lambda *_: cost})
    with pytest.raises(CostError, match=r"costs .* s; a cost must be a number, finite and not negative"):
        parallelize(joint(), PLAN, topology(), broken(topology()))


# --- what is computed again, and partitions -------------------------------------------------------------


@dataclass(frozen=True)
class DearRows(Dear):
    """A second for products with a matrix of so many rows."""

    name: str = "MatMul"
    rows: int = 0

    def compute(self, signature, demand, device):
        dear = signature.op_type == self.name and signature.inputs[1].shape[0] == self.rows
        return 1.0 if dear else 1e-3


def chain():
    """Four products, the first with a matrix of 4 rows, the others of 8; all results are equally large."""
    make = Maker("chain")
    x = make.data("x", 16, 4)
    for rows, function in ((4, "Gelu"), (8, "Tanh"), (8, "Sigmoid"), (8, "Relu")):
        x = make(function, make("MatMul", x, make.parameter(f"w_{function}", rows, 8)))
    return differentiate(make.end(make("ReduceMean", x, keepdims=0)), SGD())


def products(ops):
    return Counter(op.inputs[1].type.shape[0] for op in ops if op.op_type == "MatMul")


def test_a_budget_keeps_what_is_dear_by_the_rules():
    function, gpu = chain(), Device(0, "gpu")
    again = []
    for rows in (4, 8):
        cost_model = CostModel(topology(), rules=DearRows(rows=rows))
        made = rematerialize(function, "budget:0.5", costs=cost_model.on(gpu))
        again.append(products(made.ops) - products(function.ops))
        program = parallelize(function, Plan(remat="budget:0.5"), topology(), cost_model)
        assert products(program.stages[0].backward.function.ops) == again[-1]
    assert again[0][4] == 0 < again[1][4]
    assert again[0][8] > again[1][8]


def test_the_latencies_of_a_problem_are_those_of_the_rules():
    function = mlp(layers=3, width=64, batch=32)
    for cost_model in (dear("MatMul"), CostModel.distir(topology()), CostModel(topology())):
        problem = problem_of(function, cost_model)
        for number, op in zip(problem.ops, function.ops, strict=True):
            item = problem.items[number]
            assert item.latency == cost_model.on(topology().devices[0]).seconds(op)
            assert min(item.memory, item.compute) >= 0


def test_a_partition_is_that_of_the_rules():
    function, cluster = mlp(layers=4, width=512, batch=512), load_cluster("dgx-a100")
    memory = 6 * 2**20
    plain = partition_model(function, cluster, "size_based", memory)
    own = partition_model(function, cluster, "size_based", memory, cost_model=dear("MatMul", cluster))
    assert [len(part.ops) for part in plain.partition.parts] == [len(p.ops) for p in own.partition.parts]
    assert sum(latency.overall for latency in own.partition.latencies) == pytest.approx(4, rel=0.05)


# --- the command line -----------------------------------------------------------------------------------


def with_rules(monkeypatch, name):
    def dear_model(topology, strict=False, rules=None, kernels=""):
        return CostModel(topology, strict, Dear(name), kernels)

    for module in ("distsim.commands.simulate", "distsim.study.simulate"):
        monkeypatch.setattr(import_module(module), "CostModel", dear_model)


def note(out):
    return next(line for line in out.splitlines() if line.startswith("note: stages=auto"))


def test_the_command_line_simulates_what_its_cost_model_chose(capsys, monkeypatch):
    model = f"mlp:layers={LAYERS},width=64"
    command = ("simulate", model, "--batch", 32, "--cluster", "dgx-a100", "--optimizer", "sgd", "--plan")
    even = (*command, "pp=2,microbatches=4", "--kernels", "ops")
    auto = (*command, "pp=2,microbatches=4,stages=auto")
    before = note(run(capsys, *auto)[0])
    with_rules(monkeypatch, LOSS)
    assert note(run(capsys, *auto)[0]) != before
    shown = next(line for line in run(capsys, *even)[0].splitlines() if line.startswith("step time"))
    cluster = load_cluster("dgx-a100")
    own = dear(LOSS, cluster)
    step_time = Simulator(own).simulate(parallelize(joint(), PLAN, cluster, own)).step_time
    assert float(shown.split()[2]) == pytest.approx(step_time, rel=1e-3)


def test_the_command_line_partitions_by_its_cost_model(capsys, monkeypatch):
    with_rules(monkeypatch, "MatMul")
    command = ("simulate", "mlp:layers=4,width=64", "--batch", 32, "--cluster", "dgx-a100")
    out, _ = run(capsys, *command, "--partition", "single")
    assert "part_0" in out
    latency = next(line for line in out.splitlines() if line.startswith("part_0")).split()
    assert float(latency[-2]) == pytest.approx(4, rel=0.01)


class Free(Dear):
    """Computation takes no time: what is left is communication."""

    def compute(self, signature, demand, device):
        return 0


@pytest.mark.parametrize("plan", ["dp=2,tp=2", "pp=2,microbatches=4", "dp=2,pp=2,zero=3,remat=full"])
def test_rules_may_let_computation_take_no_time(plan):
    topology = load_cluster("dgx-a100")
    costs = CostModel(topology, rules=Free(""))
    joint = differentiate(mlp(layers=4, width=64, batch=64), SGD())
    step = Simulator(costs).simulate(parallelize(joint, Plan.parse(plan), topology, costs))
    assert step.step_time == pytest.approx(sum(step.breakdown("kind").values()))
    assert 0 < step.step_time < Simulator(CostModel(topology)).simulate(step.simulated).step_time


@pytest.mark.parametrize("stages", ["1-3", "layers", "default"])
def test_stages_are_counted_where_computation_takes_no_time(stages):
    """Each holds as many layers as where computation takes some."""
    topology = load_cluster("dgx-a100")
    joint = differentiate(gpt(layers=4, hidden=16, heads=2, seq=8, batch=4, vocab=32), SGD())
    plan = Plan.parse(f"pp=2,microbatches=2,stages={stages}")
    held = [
        [sum(op.is_call for op in stage.forward.function.ops) for stage in program.stages]
        for program in (
            parallelize(joint, plan, topology, CostModel(topology, rules=Free(""))),
            parallelize(joint, plan, topology),
        )
    ]
    assert held[0] == held[1] and sum(held[0]) == 4


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (lambda *_: 1.0, "it has no compute; give an object with compute and communicate"),
        (Dear, "it is a class; give an object"),
        (type("Half", (), {"compute": lambda *_: 0.0})(), "it has no communicate; give an object"),
    ],
)
def test_rules_that_are_none_are_refused_when_given(rules, message):
    with pytest.raises(CostError, match=f"rules=.*: {message}"):
        CostModel(load_cluster("dgx-a100"), rules=rules)
