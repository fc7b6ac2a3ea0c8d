"""Multi-tensor kernels: updates and clipping of many parameters as few launches, in the same memory."""

from collections import Counter

import pytest
from training_models import assert_same_step, mesh_of, random_inputs, small_gpt

from distsim.compose import build_program, parallelize
from distsim.cost import CostModel
from distsim.errors import PlanError
from distsim.hardware import load_cluster
from distsim.interpret import SequentialExecutor
from distsim.ir import Float, FunctionMaker, Role, Tensor, all_ops, verify
from distsim.ops import op_label, signature_of, work
from distsim.plan import Plan
from distsim.simulation import Simulator
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.plan import gradient_values
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, AdamW, differentiate
from distsim.transforms.autodiff.optimizers import optimizer_named
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels import KERNELS, fuse

EAGER = KERNELS["eager"]


def updates(count, optimizer, shape=(4, 2)):
    """The update of so many parameters, as a function by itself."""
    maker = FunctionMaker("update")
    made = []
    for i in range(count):
        weight = maker.add_input_value(f"w{i}", Tensor(Float(), shape), Role.PARAMETER)
        grad = maker.add_input_value(f"g{i}", Tensor(Float(), shape))
        made += optimizer.update(maker, weight, grad, None)
    maker.set_outputs(made)
    return maker.finalize()


@pytest.mark.parametrize(
    ("optimizer", "most"), [(SGD(), 64), (SGD(momentum=0.9), 48), (Adam(), 36), (AdamW(), 36)]
)
def test_a_launch_takes_as_many_tensors_as_fit_its_arguments(optimizer, most):
    function = updates(2 * most + 3, optimizer)
    fused = fuse(function, EAGER).function
    verify(fused)
    kind = function.ops[0].op_type
    assert [op_label(op) for op in fused.ops] == [kind] * 3
    assert [len(op.callee.ops) for op in fused.ops] == [most, most, 3]
    before, after = ([work(signature_of(op)) for op in each.ops] for each in (function, fused))
    for field in ("flops", "bytes_read", "bytes_written"):
        assert sum(getattr(w, field) for w in before) == sum(getattr(w, field) for w in after)


def test_memory_sees_what_a_kernel_overwrites_and_what_its_gradients_are():
    function = updates(5, Adam())
    (kernel,) = fuse(function, EAGER).function.ops
    fused = fuse(function, EAGER).function
    assert kernel.op_type == "Kernel"
    plain, joined = (peak_memory(each) for each in (function, fused))
    assert {d: use.peak for d, use in joined.items()} == {d: use.peak for d, use in plain.items()}
    assert gradient_values(fused) == gradient_values(function)


@pytest.mark.parametrize(
    ("optimizer", "read", "written", "kernels"),
    [
        (AdamW(), 4, 3, 1),
        (AdamW(kernel="foreach"), 12, 8, 8),  # mul_; lerp_; mul_, addcmul_; sqrt, div_, add_; addcdiv_
        (Adam(kernel="foreach"), 11, 7, 7),
        (Adam(kernel="foreach", weight_decay=0.1), 13, 8, 8),
        (SGD(momentum=0.9, kernel="foreach"), 5, 3, 3),
    ],
)
def test_foreach_reads_and_writes_tensors_again(optimizer, read, written, kernels):
    """In passes over all elements of four bytes, and as many launches; alone, and joined with others."""
    function = updates(3, optimizer)
    (kernel,) = fuse(function, EAGER).function.ops
    device = load_cluster("dgx-a100").devices[0]
    costs = CostModel(load_cluster("dgx-a100"), kernels="eager")
    for op, count in ((function.ops[0], 1), (kernel, 3)):
        demand = work(signature_of(op))
        assert (demand.bytes_read, demand.bytes_written) == (count * read * 32, count * written * 32)
        gathered = device.rates.tensor * (_listed(op) - 1)
        expected = kernels * device.rates.launch("eager") + gathered
        assert costs.launch_seconds(signature_of(op), device) == pytest.approx(expected)


def _listed(op):
    return 1 if op.op_type != "Kernel" else max(len(op.outputs), 1)


def test_a_master_copy_is_copied_into_its_weight_by_a_kernel_of_its_own():
    function = differentiate(small_gpt(), AdamW(), precision=precision_named("mixed"))
    update = next(op for op in all_ops(function) if op.op_type == "AdamOptimizer")
    demand, (weight, *others) = work(signature_of(update)), [value.type.nbytes for value in update.inputs]
    assert demand.bytes_read == sum(others) + others[-1]  # gradient, moments, master; the master again
    assert demand.bytes_written == sum(others[1:]) + weight
    assert weight != others[-1]


def test_one_kernel_a_parameter_if_asked():
    function = updates(5, Adam(kernel="single"))
    assert fuse(function, EAGER).function is function
    assert optimizer_named("adamw:kernel=single,lr=0.5") == AdamW(lr=0.5, kernel="single")
    for wrong in ("many", ""):
        with pytest.raises(PlanError, match=f"kernel={wrong} is not one of multi, single, foreach"):
            optimizer_named(f"sgd:kernel={wrong}")


@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_a_clipped_step_computes_the_step(name):
    joint = differentiate(small_gpt(), Adam(), clip=0.1)
    inputs = random_inputs(joint)
    expected = SequentialExecutor().compute(joint, inputs)
    for text in ("dp=2,pp=2,microbatches=2", "tp=2", "dp=2,zero=3"):
        plan = Plan.parse(text)
        program = build_program(joint, mesh_of(plan.dp, plan.tp, plan.pp), plan, kernels=KERNELS[name])
        assert_same_step(joint, program, inputs, expected)


def test_a_stage_updates_and_clips_in_few_launches_over_the_same_memory():
    topology, plan = load_cluster("dgx-a100"), Plan.parse("dp=2,pp=2,microbatches=2")
    times, peaks = [], []
    for optimizer in (AdamW(), AdamW(kernel="single")):
        joint = differentiate(small_gpt(), optimizer, clip=1.0)
        program = parallelize(joint, plan, topology, kernels=EAGER)
        counts = Counter(
            op_label(op)
            for stage in program.stages
            for _, block in stage.updates
            for op in all_ops(block.function)
            if "Reduce" not in op.op_type and "reduce" not in op.op_type
        )
        # One a stage; of what is summed over ranks first, another.
        assert counts["SquareSum"] <= 3 and counts["ScaleGradient"] == 2 and counts["Add"] <= 4
        simulation = Simulator(CostModel(topology)).simulate(program)
        again = Simulator(CostModel(topology), engine="events").simulate(program)
        assert again.step_time == simulation.step_time
        written = peak_memory(program.to_function(steady=True))
        found = program_memory(program).peak_of_devices()
        assert found == {d: use.peak for d, use in written.items()}
        assert counts["AdamOptimizer"] == (2 if optimizer.kernel == "multi" else len(joint.parameters))
        times.append(simulation.step_time)
        peaks.append(max(found.values()))
    assert times[0] < times[1] and peaks[0] == peaks[1]
