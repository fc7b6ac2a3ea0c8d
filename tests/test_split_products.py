"""tp_overlap=split: products in chunks, beside the ring that gathers their rows or the scatters of these."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from training_models import (
    F64,
    computed_over_ranks,
    small_gpt,
    small_llama,
    topology_of,
)

from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor
from distsim.ir import Device, Function, FunctionMaker, Mesh, Tensor, Topology, all_ops
from distsim.ir.link import Link
from distsim.ir.topology import Level
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.simulation.tasks import recurrence
from distsim.simulation.tasks.task_table import lower
from distsim.transforms import Adam, differentiate
from distsim.transforms.kernels.policies import KERNELS, Kernels
from distsim.transforms.tensor_parallel.split_products import split

SPLIT = Kernels("ops", split=True)


@pytest.mark.parametrize(
    ("build", "text", "kernels"),
    [
        (small_llama, "tp=4", "fused"),
        (small_llama, "dp=2,tp=2,microbatches=2,remat=full", "eager"),
        (small_llama, "tp=2,pp=2,microbatches=4,schedule=zb_h1", "compiled"),
        (small_gpt, "dp=2,tp=2,zero=3,remat=ops:MatMul", "eager"),
        (small_gpt, "tp=2,pp=2,microbatches=2", "ops"),
    ],
)
def test_every_rank_computes_the_same_step(build, text, kernels):
    joint = differentiate(build(batch=4, seq=8), Adam())
    program = computed_over_ranks(joint, Plan.parse(f"{text},sp=on,tp_overlap=split"), kernels)
    assert "MPIShift" in {op.op_type for op in all_ops(program.to_function(steady=True))}


def between_products(topology: Topology, rows: int, width: int, pieces: tuple[int, ...] | None) -> Function:
    """A product of gathered rows, which another op reads too, and one whose rows are scattered."""
    mesh = Mesh(topology.devices, tp=len(topology.devices))
    maker, over = FunctionMaker("rank"), {"axis": "tp", "dim": 1}
    over |= {} if pieces is None else {"pieces": pieces}
    x = maker.add_input_value("x", Tensor(F64, (1, rows // len(mesh), width), mesh))
    weights = [maker.add_input_value(name, Tensor(F64, (width, width), mesh)) for name in "ab"]
    whole = maker.add_op("MPIAllgather", inputs=[x], attributes=over)
    first = maker.add_op("MatMul", inputs=[whole, weights[0]])
    second = maker.add_op("MatMul", inputs=[first, weights[1]])
    maker.set_outputs([maker.add_op("MPIReduceScatter", inputs=[second], attributes=over), whole])
    return maker.finalize()


@pytest.mark.parametrize("pieces", [None, (16, 8), (12, -12)])
def test_chunks_lie_where_parts_do(pieces):
    """Also where a rank's part is in pieces, or in pieces of the opposite order, as of a causal context."""
    function = between_products(topology_of(4), 24, 4, pieces)
    rng = np.random.default_rng(0)
    inputs = [[rng.standard_normal(value.type.shape) for _ in range(4)] for value in function.inputs]
    found, plain = (
        SequentialExecutor().compute(each, inputs) for each in (split(function, SPLIT).function, function)
    )
    for own, expected in zip(found, plain, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-12)


def test_what_is_exposed():
    """Of the gather nothing, if a part is sent in the time of its product; of the scatter its last chunk."""
    topology = topology_of(4, gbps=8000.0, throughput=1e12, kernel_launch_overhead=0.0)
    function = between_products(topology, 512, 512, None)
    costs = CostModel(topology)
    product = 2 * 512**3 / 1e12
    moved = 512 * 512 * 8 * 3 / 4 / 1e12  # of a whole gather, or scatter
    assert moved < product / 4
    ways = (function, split(function, SPLIT).function)
    plain, chunks = (max(recurrence.run(lower(each, costs))[1]) for each in ways)
    assert plain == pytest.approx(2 * product + 2 * moved, rel=1e-6)
    assert chunks == pytest.approx(2 * product + moved / 4, rel=1e-6)


def test_nothing_has_to_begin_for_chunks():
    """Kernels write to their peers' memory: what NCCL takes to start is in the plain collectives alone."""
    start, level = 1e-3, Level("nvlink", Link(1e12), 4)
    costs = [
        CostModel(Topology.hierarchical(Device(0, "gpu"), 4, [replace(level, start=each)]))
        for each in (0.0, start)
    ]
    group = tuple(costs[0].topology.devices)
    function = between_products(costs[0].topology, 512, 512, None)
    for own, slower in ((split(function, SPLIT).function, 0.0), (function, start)):
        moved = [signature_of(op) for op in own.ops if operator(op.op_type).moves]
        quick, slow = ([model.communication_seconds(each, group) for each in moved] for model in costs)
        assert slow == pytest.approx([seconds + slower for seconds in quick], rel=1e-12) and moved


def test_as_many_bytes_travel():
    """A ring of t ranks sends t - 1 parts of a gather; scatters in chunks what the one scattered."""
    topology = topology_of(4)
    sent: Counter[str] = Counter()
    for op in all_ops(split(between_products(topology, 24, 4, None), SPLIT).function):
        if operator(op.op_type).moves:
            sent[operator(op.op_type).communication.kind] += operator(op.op_type).communication.nbytes(
                signature_of(op)
            )
    assert sent == {"shift": 3 * 6 * 4 * 8, "reduce_scatter": 24 * 4 * 8}


@pytest.mark.parametrize(("joined", "biases"), [("eager", 4), ("fused", 1)])
def test_a_cast_and_a_bias_go_with_their_product(joined, biases):
    """Megatron-LM's kernel of a bias and GELU adds the bias to all rows; else a product's kernel does."""
    mesh = Mesh(topology_of(4).devices, tp=4)
    maker = FunctionMaker("rank")
    x = maker.add_input_value("x", Tensor(F64, (1, 6, 4), mesh))
    weight = maker.add_input_value("weight", Tensor(F64, (4, 4), mesh))
    bias = maker.add_input_value("bias", Tensor(F64, (4,), mesh))
    whole = maker.add_op("MPIAllgather", inputs=[x], attributes={"axis": "tp", "dim": 1})
    product = maker.add_op("MatMul", inputs=[maker.add_op("Neg", inputs=[whole]), weight])
    maker.set_outputs([maker.add_op("Gelu", inputs=[maker.add_op("Add", inputs=[product, bias])])])
    function = maker.finalize()
    chunks = split(function, replace(KERNELS[joined], split=True)).function
    kinds = Counter(op.op_type for op in chunks.ops)
    assert (kinds["Neg"], kinds["MatMul"], kinds["Add"], kinds["Gelu"]) == (4, 4, biases, 1)
    rng = np.random.default_rng(0)
    inputs = [[rng.standard_normal(value.type.shape) for _ in range(4)] for value in function.inputs]
    (found,), (plain,) = (SequentialExecutor().compute(each, inputs) for each in (chunks, function))
    np.testing.assert_allclose(found, plain, rtol=1e-12)


def test_split_needs_parts_of_a_sequence():
    with pytest.raises(PlanError, match="tp_overlap=split .* sp=off .* use sp=on, or tp_overlap=on"):
        Plan.parse("tp=2,tp_overlap=split")
    with pytest.raises(PlanError, match="tp_overlap=split is about what tp ranks bring together, and tp=1"):
        Plan.parse("tp_overlap=split")
    with pytest.raises(PlanError, match="tp_overlap='halves' is not one of off, on, split"):
        Plan.parse("tp=2,tp_overlap=halves")
