"""Condensed matrices: fewer cells, the same times, and a step that does not grow with its layers."""

import numpy as np
import pytest
from program_models import invent

from distsim.compose import parallelize
from distsim.executor import CostModel
from distsim.hardware import load_cluster
from distsim.models import mlp
from distsim.plan import Plan
from distsim.program.table import ONCE
from distsim.simulation.maxplus.call_arrays import call_arrays
from distsim.simulation.maxplus.engine import run_program
from distsim.simulation.maxplus.matrices import Cells, Matrices, condensed, max_plus
from distsim.simulation.maxplus.row_loop import run_rounds
from distsim.transforms import Adam, differentiate

NEVER = -np.inf


def products(*given):
    """Matrices of (ins, outs, matrix): all cells are registers, of which two are clocks."""
    sides = []
    for side in (0, 1):
        own = [each[side] for each in given]
        numbers = np.array([number for cells in own for number in cells], np.int64)
        start = np.cumsum([0, *map(len, own)])
        sides.append(Cells(start, numbers, np.full(len(numbers), ONCE), {}))
    matrix = np.concatenate([np.array(each[2], float).reshape(-1) for each in given])
    return Matrices(*sides, matrix, int(max(sides[0].number.max(), sides[1].number.max())) + 1, 2)


def matrix_of(matrices, product):
    heights, widths = np.diff(matrices.outs.start), np.diff(matrices.ins.start)
    part = matrices.matrix[matrices.start[product] : matrices.start[product + 1]]
    return part.reshape(heights[product], widths[product])


def test_max_plus_is_the_maximum_of_sums():
    left, right = np.array([[1.0, NEVER], [0.0, 5.0]]), np.array([[2.0, 3.0], [4.0, NEVER]])
    np.testing.assert_array_equal(max_plus(left, right), [[3.0, 4.0], [9.0, 3.0]])


def test_many_values_from_one_stream_to_another_are_one():
    """A makes values 2, 3 and 4 at 1, 2 and 3 s on clock 0; B waits on clock 1 for all, then takes 4 s."""
    made = ([0], [0, 2, 3, 4], [[3.0], [1.0], [2.0], [3.0]])
    read = ([1, 2, 3, 4], [1], [[7.0, 6.0, 5.0, 4.0]])
    found = condensed(products(made, read))
    assert found.registers == 3, "two clocks and one value"
    np.testing.assert_array_equal(matrix_of(found, 0), [[3.0], [7.0]])  # when the last is there, plus 4
    np.testing.assert_array_equal(matrix_of(found, 1), [[7.0, 0.0]])


def test_a_value_that_another_one_reads_stays():
    made = ([0], [0, 2, 3, 4], [[3.0], [1.0], [2.0], [3.0]])
    read = ([1, 2, 3, 4], [1], [[7.0, 6.0, 5.0, 4.0]])
    other = ([1, 3], [1], [[1.0, 1.0]])
    found = condensed(products(made, read, other))
    assert found.registers == 4
    np.testing.assert_array_equal(matrix_of(found, 0), [[3.0], [2.0], [7.0]])
    np.testing.assert_array_equal(matrix_of(found, 2), [[1.0, 1.0]])


def test_what_two_make_is_not_condensed():
    made = ([0], [0, 2, 3], [[3.0], [1.0], [2.0]])
    full = products(made, made, ([1, 2, 3], [1], [[7.0, 6.0, 5.0]]))
    assert condensed(full) is full


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_the_streams_are_free_at_the_same_times(kind):
    for seed in range(12):
        case = invent(seed, 8, kind)
        run = run_program(case.program, case.cost_model, case.overlap)
        model, table = run.model, case.program.table()
        full = model.wiring.matrices
        cells = full.registers + model.wiring.batched * table.microbatches
        calls = call_arrays(table, model.order, full)
        state = model.state()._replace(
            times=np.zeros(cells), x=np.empty(np.diff(calls.in_start).max(initial=1))
        )
        run_rounds(calls, None, state)
        np.testing.assert_array_equal(run.times[: full.clocks], state.times[: full.clocks])


def test_a_step_takes_as_many_cells_whatever_its_layers():
    topology = load_cluster("dgx-a100")
    found, full = [], []
    for layers in (8, 32):
        training = differentiate(mlp(layers=layers, width=64, batch=64), Adam())
        program = parallelize(training, Plan.parse("dp=2,pp=2,microbatches=4"), topology)
        model = run_program(program, CostModel(topology)).model
        found.append((model.cells, len(model.calls.in_cell), len(model.calls.matrix)))
        full.append(model.wiring.matrices.registers)
    assert found[0] == found[1]
    assert full[0] + 12 < full[1], "the gradients of 24 layers more, each its own"
