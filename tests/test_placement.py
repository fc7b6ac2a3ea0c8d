"""Placements and what moving between them costs; the least-cost assignment against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.errors import TypeRuleError
from distsim.executor import SequentialExecutor
from distsim.hardware import collective_time
from distsim.ir import Device, Float, FunctionMaker, Int64, Mesh, Tensor, Topology
from distsim.ops.communication import gather, scatter
from distsim.ops.parts import join_parts, take_part
from distsim.transforms.sharding.layout import (
    PARTIAL,
    REPLICATED,
    DividedAxis,
    Placement,
    State,
    divisible,
    local_shape,
    moved_bytes,
    sharded,
)
from distsim.transforms.sharding.variable_elimination import EliminationProblem, solve

AXES = (DividedAxis("dp", 2), DividedAxis("tp", 4))
TENSOR = Tensor(Float(), (8, 24))
STATES = [REPLICATED, PARTIAL, sharded(0), sharded(1), sharded(1, (8, 16))]


# --- placements -----------------------------------------------------------------------------------


def test_states_print_short():
    assert [str(state) for state in STATES] == ["R", "P", "S0", "S1", "S1[8, 16]"]
    assert str(Placement(AXES, (sharded(0), PARTIAL))) == "dp:S0 tp:P"


def test_a_placement_says_what_is_scattered():
    for state in (REPLICATED, PARTIAL):
        assert Placement(AXES, (state, state)).shards((2, 3)) == ()
    placed = Placement(AXES, (sharded(0), sharded(1, (8, 16))))
    assert placed.shards((4, 6)) == ((0, "dp", None), (1, "tp", (8, 16)))
    flat = Placement(AXES, (REPLICATED, sharded(0)), flat=("dp", (4, 24)))
    assert flat.shards((48,)) == ((0, "tp", None), (None, "dp", (4, 24)))
    assert str(flat) == "dp:R tp:S0 dp:flat[4, 24]"
    context = Placement((DividedAxis("cp", 2, zigzag=True), DividedAxis("tp", 3)), (sharded(0), sharded(0)))
    assert context.shards((4, 5)) == ((0, "cp", (12, -12)), (0, "tp", None))


@pytest.mark.parametrize(
    ("state", "ranks", "fits"),
    [
        (REPLICATED, 7, True),
        (PARTIAL, 7, True),
        (sharded(0), 8, True),
        (sharded(0), 3, False),
        (sharded(0), 16, False),
        (sharded(1, (8, 16)), 8, True),
        (sharded(1, (6, 18)), 4, False),  # 24 is divisible by 4, its pieces are not
        (sharded(1, (8, 8)), 4, False),  # pieces of another dimension
        (sharded(1, (0, 24)), 4, False),
    ],
)
def test_equal_parts_or_none(state, ranks, fits):
    assert divisible(TENSOR.shape, state, ranks) is fits


def test_local_shapes():
    assert local_shape((8, 24), REPLICATED, 4) == local_shape((8, 24), PARTIAL, 4) == (8, 24)
    assert local_shape((8, 24), sharded(0), 4) == (2, 24)
    assert local_shape((8, 24), sharded(1, (8, 16)), 8) == (8, 3)


# --- what moves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(STATES, STATES)), ids=str)
def test_moved_bytes_are_those_of_the_ring_algorithms(source, target, ranks):
    """Set beside the seconds of the collectives on links of one byte per second."""
    size, found = TENSOR.nbytes, moved_bytes(TENSOR, source, target, ranks)
    topology = Topology()
    group = tuple(topology.add_device("gpu") for _ in range(ranks))
    for a, b in itertools.combinations(group, 2):
        topology.set_bandwidth(a, b, gbps=8e-9)

    def seconds(kind: str, nbytes: float) -> float:
        return collective_time(kind, nbytes, group, topology)

    if source == target or source is REPLICATED:
        expected = 0.0  # a rank takes its part, or an equal share of every number
    elif target is PARTIAL:
        expected = math.inf
    elif source is PARTIAL:
        expected = seconds("reduce_scatter" if target.sharded else "all_reduce", size)
    elif target.sharded and source.dim != target.dim and not source.pieces and not target.pieces:
        expected = seconds("all_to_all", size / ranks)
    else:
        expected = seconds("all_gather", size)
    assert found == pytest.approx(expected, rel=1e-12)


def test_moves_obey_the_triangle_inequality_up_to_the_all_gather():
    """No detour is cheaper than the direct move, so a value is brought to each state straight away."""
    settled = [state for state in STATES if state is not PARTIAL]  # what is sharded does not become partial
    for a, b, c in itertools.product(STATES, STATES, settled):
        direct = moved_bytes(TENSOR, a, c, 4)
        detour = moved_bytes(TENSOR, a, b, 4) + moved_bytes(TENSOR, b, c, 4)
        assert direct <= detour + 1e-9, f"{a} to {c} directly {direct}, by way of {b} {detour}"


@st.composite
def scattered(draw):
    """(whole array, mesh, shards): each dimension divided by at most one axis, perhaps in pieces; what that
    leaves perhaps divided flat by another axis."""
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    devices = [Device(i, "gpu") for i in range(math.prod(sizes))]
    mesh = Mesh(devices, dp=sizes[0], tp=sizes[1])
    if draw(st.booleans()):  # ranks of an axis in another order than the devices', by a view
        mesh = Mesh(devices, {"dp": ("inner", "outer")}, outer=1, tp=sizes[1], inner=sizes[0])
    dims = draw(st.permutations(range(3)))[: draw(st.integers(0, 2))]
    shape, shards = [draw(st.integers(1, 3)) for _ in range(3)], []
    for dim, axis in zip(dims, draw(st.permutations(["dp", "tp"])), strict=False):
        pieces = draw(st.none() | st.lists(st.integers(1, 3), min_size=2, max_size=3))
        count = mesh.axis_size(axis)
        pieces = pieces and tuple(n * count for n in pieces)
        shape[dim] = sum(pieces) if pieces else shape[dim] * count
        shards.append((dim, axis, pieces))
    free = [axis for axis in ("dp", "tp") if axis not in [axis for _, axis, _ in shards]]
    if free and draw(st.booleans()):
        taken = {dim: mesh.axis_size(axis) for dim, axis, _ in shards}
        shards.append((None, free[0], tuple([n // taken.get(dim, 1) for dim, n in enumerate(shape)])))
    return np.arange(math.prod(shape)).reshape(shape), mesh, tuple(shards)


@given(scattered())
@settings(max_examples=60)
def test_gather_is_the_inverse_of_scatter(case):
    whole, mesh, shards = case
    ranks = scatter(whole, mesh, shards)
    sizes = {dim: mesh.axis_size(axis) for dim, axis, _ in shards}
    local = tuple(n // sizes.get(dim, 1) for dim, n in enumerate(whole.shape))
    if None in sizes:
        local = (math.ceil(math.prod(local) / sizes[None]),)
    assert [rank.shape for rank in ranks] == [local] * len(mesh)
    np.testing.assert_array_equal(gather(ranks, mesh, shards), whole)
    maker = FunctionMaker("there and back")
    x = maker.add_input_value("x", Tensor(Int64(), whole.shape, Device(0, "gpu")))
    attributes = {"to": mesh, "shards": shards}
    (parts,) = maker.add("MPIScatter", [x], attributes)
    (back,) = maker.add("MPIGather", [parts], {**attributes, "to": x.type.device, "from_mesh": mesh})
    maker.set_outputs([parts, back])
    made, again = SequentialExecutor().compute(maker.finalize(), [whole])
    np.testing.assert_array_equal(made, ranks)
    np.testing.assert_array_equal(again, whole)


def test_flat_parts_are_padded_at_the_end():
    parts = [take_part(np.arange(1, 6).reshape(5, 1), None, rank, 4, (5, 1)).tolist() for rank in range(4)]
    assert parts == [[1, 2], [3, 4], [5, 0], [0, 0]], "two each, so the last rank has padding only"
    maker, mesh = FunctionMaker("wrong"), Mesh([Device(i, "gpu") for i in range(2)], dp=2)
    x = maker.add_input_value("x", Tensor(Int64(), (5, 1), Device(0, "gpu")))
    with pytest.raises(TypeRuleError, match=r"is divided flat as a tensor of shape \(5,\)"):
        maker.add("MPIScatter", [x], {"to": mesh, "shards": ((None, "dp", (5,)),)})


def test_pieces_are_divided_each():
    array = np.arange(12)
    assert take_part(array, 0, 1, 2, (4, 8)).tolist() == [2, 3, 8, 9, 10, 11]
    parts = [take_part(array, 0, i, 2, (4, 8)) for i in range(2)]
    assert join_parts(parts, 0, (4, 8)).tolist() == array.tolist()


# --- the least-cost assignment ---------------------------------------------------------------------


def cost_of(problem: EliminationProblem, choices) -> float:
    unary = sum(float(table[c]) for table, c in zip(problem.unary, choices, strict=True))
    return unary + sum(float(table[choices[a], choices[b]]) for (a, b), table in problem.pairs.items())


def brute_force(problem: EliminationProblem) -> float:
    return min(cost_of(problem, choices) for choices in itertools.product(*map(range, problem.sizes)))


@st.composite
def problems(draw) -> EliminationProblem:
    """Up to seven variables of up to four choices, some pairs of them with costs, some forbidden."""
    costs = st.integers(0, 20).map(float) | st.just(math.inf)
    problem = EliminationProblem()
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    for size in sizes:
        problem.variable(draw(st.lists(costs, min_size=size, max_size=size)))
    count = draw(st.integers(0, 2 * len(sizes)))
    for _ in range(count):
        a, b = (draw(st.integers(0, len(sizes) - 1)) for _ in range(2))
        table = draw(st.lists(costs, min_size=sizes[a] * sizes[b], max_size=sizes[a] * sizes[b]))
        problem.pair(a, b, np.array(table).reshape(sizes[a], sizes[b]))
    return problem


@given(problems())
@settings(max_examples=120)
def test_the_assignment_is_the_cheapest(problem):
    found = solve(problem)
    assert found.proven
    assert found.cost == brute_force(problem)
    assert [0 <= c < n for c, n in zip(found.choices, problem.sizes, strict=True)] == [True] * len(
        problem.sizes
    )
    assert cost_of(problem, found.choices) == found.cost


@given(problems(), st.integers(1, 30), st.sampled_from([1, 4, 10_000]))
@settings(max_examples=150)
def test_with_small_tables_the_assignment_is_valid_and_does_not_claim_too_much(problem, limit, branches):
    found, optimum = solve(problem, (limit,), branches), brute_force(problem)
    assert cost_of(problem, found.choices) == found.cost
    assert found.cost >= optimum
    assert found.cost == optimum or not found.proven
    assert found.proven or branches < 10_000
    if branches > 1:  # else an assignment may not be found though there is one
        assert math.isfinite(found.cost) == math.isfinite(optimum)


def all_tied(table, count=6):
    problem = EliminationProblem()
    for _ in range(count):
        problem.variable(np.zeros(len(table)))
    for a, b in itertools.combinations(range(count), 2):
        problem.pair(a, b, np.array(table, float))
    return problem


def test_a_bound_proves_what_tables_cannot_where_nothing_would_choose_otherwise():
    agreeing = all_tied([[3, 9, 9], [9, 2, 9], [9, 9, 4]])
    found = solve(agreeing, (1,), 1)
    assert found.proven and found.choices == (1,) * 6 and found.cost == 15 * 2


def test_choices_are_gone_through_until_one_is_proven():
    unlike = all_tied([[1, 0, 0], [0, 1, 0], [0, 0, 1]])  # two of three colours each: three pairs alike
    first = solve(unlike, (1,), 1)
    assert not first.proven and first.cost >= 3
    found = solve(unlike, (1,), 3**6)
    assert found.proven and found.cost == 3 and cost_of(unlike, found.choices) == 3


def test_costs_of_a_pair_are_given_in_either_order_and_add_up():
    problem = EliminationProblem()
    a, b = problem.variable([0, 0]), problem.variable([0, 0, 0])
    table = np.array([[5.0, 4, 3], [2, 1, 6]])
    problem.pair(a, b, table)
    problem.pair(b, a, table.T)
    assert (solve(problem).choices, solve(problem).cost) == ((1, 1), 2.0)


def test_a_pair_of_a_variable_with_itself_costs_its_diagonal():
    problem = EliminationProblem()
    a = problem.variable([0, 1])
    problem.pair(a, a, np.array([[7.0, 0], [0, 2]]))
    assert (solve(problem).choices, solve(problem).cost) == ((1,), 3.0)


def test_a_long_chain_is_proven_and_is_the_dynamic_program():
    rng, problem, size, length = np.random.default_rng(0), EliminationProblem(), 5, 2000
    tables = rng.random((length - 1, size, size))
    for _ in range(length):
        problem.variable(np.zeros(size))
    best = np.zeros(size)
    for i, table in enumerate(tables):
        problem.pair(i, i + 1, table)
        best = (best[:, None] + table).min(axis=0)
    found = solve(problem)
    assert found.proven and found.cost == pytest.approx(best.min(), rel=1e-12)
    assert cost_of(problem, found.choices) == pytest.approx(found.cost, rel=1e-12)


def test_solving_leaves_the_problem_as_it_was():
    problem = EliminationProblem()
    a, b = problem.variable([1, 2]), problem.variable([3, 4])
    problem.pair(a, b, np.eye(2))
    assert solve(problem) == solve(problem)
    assert solve(problem, (1,)) == solve(problem, (1,))


def test_contradictory_demands_cost_infinity():
    problem = EliminationProblem()
    a, b = problem.variable([0, math.inf]), problem.variable([0, math.inf])
    problem.pair(a, b, np.array([[math.inf, 0], [0, 0]]))
    assert solve(problem).cost == math.inf


def test_a_state_is_a_value():
    assert State("S", 1) == sharded(1) != sharded(1, (8, 16)) and len({*STATES, *STATES}) == 5
