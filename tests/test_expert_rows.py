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
