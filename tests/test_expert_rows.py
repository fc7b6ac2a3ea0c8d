"""The order in which ranks of several experts have their rows: copies beside the exchanges."""

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
