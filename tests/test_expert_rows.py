"""The order in which ranks of several experts have their rows: copies beside the exchanges."""

import re
from collections import Counter

import pytest

from distsim import simulate
from distsim.ir import all_ops


@pytest.mark.parametrize(
    ("experts", "options", "plan", "rows"),
    [
        (8, "", "dp=4,ep=4", 8 * 2 * 64 // 4),  # of two sequences each: all the choices of a rank's tokens
        (8, "", "dp=2,tp=2,sp=on,ep=2", 8 * 2 * 64 // 2),  # what tp ranks gather
        (4, "", "dp=4,ep=4", 0),  # one expert a rank
        (8, "dispatcher=deepep,", "dp=4,ep=4", 0),
        (8, "", "dp=4", 0),
    ],
)
def test_rows_are_copied_into_the_order_of_a_ranks_experts(experts, options, plan, rows):
    """Once after the dispatch and once before the combine of a layer, in each pass."""
    model = f"moe:{options}layers=2,hidden=32,heads=8,seq=64,vocab=64,ffn=64,experts={experts},top_k=2"
    step = simulate(model, "dgx-a100", plan, batch=8, kernels="ops").simulated
    found = Counter(
        (row.kind, op.op_type, op.inputs[0].type.nbytes)
        for row in step.table().blocks
        for op in (all_ops(row.function) if row.function else ())
        if op.op_type in ("CopyIn", "CopyOut")
    )
    expected = [(kind, op_type, rows * 32 * 4) for kind in "FB" for op_type in ("CopyIn", "CopyOut")]
    assert found == (dict.fromkeys(expected, 2) if rows else {})


@pytest.mark.parametrize(("kernels", "beside"), [("fused", False), ("eager", True)])
def test_shared_experts_run_beside_exchanges_where_these_are_not_waited_for(kernels, beside):
    """Megatron-LM's computation waits for its all-to-alls, forward and backward."""
    model = "moe:layers=2,hidden=1024,heads=8,seq=1024,vocab=64,ffn=512,experts=8,top_k=2,shared=4"
    step = simulate(model, "dgx-a100", "dp=4,ep=4", batch=8, kernels=kernels)
    spans = [*step.spans()]
    moving = [(span.start, span.end) for span in spans if span.op.op_type == "MPIAlltoall"]
    products = [(span.start, span.end) for span in spans if span.op.op_type.startswith("MatMul")]
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moving for b in products)
    assert len(moving) >= 8 and (both > 1e-5) == beside


def test_gradients_of_experts_are_reduced_as_backward_makes_them():
    """Among those of other parameters: what divides them on the compute stream waits for no later layer."""
    model = "moe:layers=4,hidden=1024,heads=8,seq=512,vocab=64,ffn=512,experts=4,top_k=2"
    plan = "dp=4,ep=2,zero=1,bucket=4MB,overlap_grads=on"
    step = simulate(model, "dgx-a100", plan, batch=8, stack="megatron")
    passes = [span for span in step.spans() if span.op.op_type == "AverageGradients"]
    reduced = sorted(passes, key=lambda span: span.start)
    named = [re.findall(r"\bdh(\d)\.", str(span.op)) for span in reduced]
    layers = [min(map(int, each)) for each in named if each]
    assert len({*layers}) == 4 and layers == sorted(layers, reverse=True)
