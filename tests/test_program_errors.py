"""What a Program refuses when it is made: blocks that wait for each other, stages that share ranks."""

import re
from dataclasses import replace

import numpy as np
import pytest
from training_models import laid_out, mesh_of, small_mlp, topology_of

from distsim.errors import DistsimError, IRError, ScheduleError
from distsim.executor import CostModel, Simulator
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Device, Float64, Function, FunctionMaker, Literal, Tensor, Value, verify
from distsim.program.block import Block
from distsim.program.parts import ProgramInput, ProgramOutput, Stage
from distsim.program.program import Program
from distsim.schedule import Action, Kind, Schedule, schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import differentiate

PATTERN = logical_mesh(Device(0, "gpu"), 1, 1)
TYPE = Tensor(Float64(), (4,), PATTERN)
KEYS = {name: Value(name, TYPE) for name in ("x", "f0", "f1", "b0", "b1", "s", "u0", "u1", "y", "z")}


def block(reads: str, makes: str, sums: str = "") -> Block:
    """A block that reads and makes these keys; ``sums`` are those of what it makes that are summed."""

    def function(so_far: list[str]) -> Function:
        maker = FunctionMaker("block")
        values = [maker.add_input_value(name, TYPE) for name in reads.split()]
        values += [maker.add("Constant", (), {"value": Literal(np.ones(4)), "device": PATTERN})[0]]
        made = {name: maker.add("Add", [values[0], values[-1]])[0] for name in makes.split()}
        for name in so_far:
            sum_ = maker.add_input_value(name, TYPE)
            made[name] = maker.add("AccumulateInto", [sum_, made[name]])[0]
        maker.set_outputs(list(made.values()))
        return maker.finalize()

    inputs, outputs, summed = (tuple([KEYS[name] for name in own.split()]) for own in (reads, makes, sums))
    return Block(function([]), inputs, outputs, summed, function(sums.split()) if sums else None)


SOUND = {"F0": "x > f0", "F1": "f0 > f1", "B1": "f1 > b1", "B0": "f0 b1 > b0 s / s", "U0": "s > u0", "U1": ""}


def two_stages(**changed: str) -> Program:
    """Two stages, blocks given as "what it reads > what it makes / sums"."""
    blocks: dict[str, Block] = {}
    for name, text in (SOUND | changed).items():
        reads, makes, sums = re.fullmatch(r"([^>]*)>?([^/]*)/?(.*)", text).groups()
        blocks[name] = block(reads, makes, sums)
    mesh = mesh_of(pp=2)
    stages = [
        Stage(own, blocks[f"F{i}"], blocks[f"B{i}"], ((0, blocks[f"U{i}"]),))
        for i, own in enumerate(mesh.slices("pp"))
    ]
    inputs = (ProgramInput(Value("x", Tensor(Float64(), (8,))), KEYS["x"], (), True, (0,)),)
    outputs = (ProgramOutput(KEYS["u0"], (), False, 0), ProgramOutput(KEYS["b0"], (), True, 0))
    order = schedule("1f1b", 2, 2)
    return Program("two", mesh, PATTERN, tuple(stages), order, inputs, outputs)


def simulated(engine: str):
    return lambda p: Simulator(CostModel(topology_of(2)), engine=engine).simulate(p).step_time


READERS = {
    "maxplus": simulated("maxplus"),
    "events": simulated("events"),
    "memory": lambda program: program_memory(program).peaks,
    "written out": lambda program: program.to_function().ops,
}

REFUSED = {
    "stages that wait for each other": (
        lambda: two_stages(B1="f1 b0 > b1"),
        r"two deadlocks in every microbatch under any schedule: .* cycle: B0@1 waits for B0@0 \(for its "
        r"'b0'\); B0@0 waits for B0@1 \(for its 'b1'\); cut",
    ),
    "forward waits for backward": (
        lambda: two_stages(F0="x b0 > f0"),
        r"F0@0 waits for B0@0 \(for its 'b0'\); B0@0 waits for F0@0 \(for its 'f0'\)",
    ),
    "a block that waits for itself": (
        lambda: two_stages(F1="f0 f1 > f1"),
        r"cycle: F0@1 waits for F0@1 \(for its 'f1'\)",
    ),
    "updates that wait for each other": (
        lambda: two_stages(U0="s u1 > u0", U1="u0 > u1"),
        r"two deadlocks under any schedule: .*U@0 \(round 0\) waits for U@1 \(round 0\) \(for its 'u1'\); ",
    ),
    "a microbatch that waits for an update": (
        lambda: two_stages(F0="x u0 > f0"),
        r"F0@0 waits for U@0 \(round 0\) .*; U@0 \(round 0\) waits for B0@0 .*; B0@0 waits for F0@0 ",
    ),
    "a later stage read in forward": (
        lambda: two_stages(F0="x y > f0", F1="f0 > f1", B1="f1 > b1 y"),
        r"F0@0 waits for B0@1 \(for its 'y'\); B0@1 waits for F0@1",
    ),
    "an order no schedule has": (
        lambda: two_stages(F0="x y > f0", F1="> f1 y"),
        r"F0@0 reads 'y' of F0@1, which runs after it in every schedule",
    ),
    "what nobody makes": (
        lambda: two_stages(F1="f0 z > f1"),
        r"F0@1 reads 'z', which no block makes and which is no input",
    ),
    "what two blocks make": (
        lambda: two_stages(F1="f0 > f1 f0"),
        r"F0@1 makes 'f0', which is made by F0@0; make a value once",
    ),
    "an input that a block makes": (
        lambda: two_stages(F1="f0 > f1 x"),
        r"F0@1 makes 'x', which is an input of the program",
    ),
    "an input on a stage that does not hold it": (
        lambda: two_stages(F1="f0 x > f1"),
        r"F0@1 reads the input 'x', which only stage 0 holds; list stage 1 among its stages",
    ),
    "the sum of another stage": (
        lambda: two_stages(B1="f1 > b1 z / z", B0="f0 b1 z > b0 s / s"),
        r"B0@0 reads 'z', the sum over microbatches of B0@1 on another stage",
    ),
    "a sum put together": (
        lambda: returning(KEYS["s"], True, 0),
        r"the output 's' is to be put together over microbatches, and is made once per step",
    ),
    "an output that nobody makes": (
        lambda: returning(KEYS["z"], False, 0),
        r"no block makes the output 'z'",
    ),
    "an output on no stage": (
        lambda: returning(KEYS["u0"], False, 2),
        r"'u0' is on stage 2; choose one of 0\.\.1",
    ),
    "two stages on one rank": (
        lambda: on_meshes(0, 0),
        r"stage 1 runs on Mesh\(dp=1, tp=1\)\[gpu:0\]; the schedule 1f1b has it on rank 1: "
        r"give it the slice pp=1 of the program's mesh, Mesh\(dp=1, tp=1\)\[gpu:1\]",
    ),
    "stages on each other's ranks": (
        lambda: on_meshes(1, 0),
        r"stage 0 runs on .*gpu:1\].* give it the slice pp=0 of the program's mesh, .*gpu:0\]",
    ),
    "a block on another mesh than the pattern": (
        lambda: replace(two_stages(), pattern=logical_mesh(Device(0, "gpu"), 2, 1), shared_parts=None),
        r"is on Mesh\(dp=1, tp=1\).*; blocks lie on the program's pattern, Mesh\(dp=2, tp=1\)",
    ),
    "a mesh of more stages": (
        lambda: replace(two_stages(), mesh=mesh_of(pp=3)),
        r"1f1b is for 2 ranks, the mesh has pp=3",
    ),
    "a schedule of other stages": (
        lambda: replace(two_stages(), schedule=schedule("gpipe", 3, 2)),
        r"gpipe is for 3 stages, the program has 2",
    ),
    "a schedule whose ranks wait for each other": (
        lambda: replace(two_stages(), schedule=stuck()),
        r"stuck deadlocks after 2 actions: B0@0 waits for B0@1",
    ),
}


def returning(key: Value, microbatched: bool, stage: int) -> Program:
    return replace(two_stages(), outputs=(ProgramOutput(key, (), microbatched, stage),))


def on_meshes(*slices: int) -> Program:
    """Two stages on these slices of the mesh."""
    program = two_stages()
    stages = [
        replace(stage, mesh=program.mesh.at(pp=i)) for stage, i in zip(program.stages, slices, strict=True)
    ]
    return replace(program, stages=tuple(stages))


def stuck() -> Schedule:
    f, b = Kind.FORWARD, Kind.BACKWARD
    first, last = ((f, b, f, b), (0, 0, 1, 1)), ((f, f, b, b), (0, 1, 0, 1))
    ranks = [
        tuple([Action(p, r, m) for p, m in zip(*own, strict=True)]) for r, own in enumerate((first, last))
    ]
    return Schedule("stuck", 2, 2, tuple(ranks))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_same_words_whoever_reads_it(name):
    made, words = REFUSED[name]
    errors = set()
    for read in READERS.values():
        with pytest.raises((IRError, ScheduleError), match=words) as refused:
            read(made())
        errors.add((type(refused.value), str(refused.value)))
    assert len(errors) == 1 and isinstance(refused.value, DistsimError)


def test_what_is_sound_is_read_by_all():
    program = two_stages()
    peaks = [peak for read in READERS.values() for peak in [read(program)]]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-12) and all(peaks)
    verify(program.to_function())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"inputs": ()}, "gives it 0 and has 2 keys"),
        ({"accumulating": None}, "'s' is summed over microbatches, and there is no function"),
        ({"accumulated": (KEYS["z"],)}, "the sum 'z' is none of the block's outputs"),
    ],
)
def test_a_block_whose_keys_do_not_fit_its_function_is_refused(changed, words):
    with pytest.raises(IRError, match=words):
        replace(block("x", "y s", "s"), **changed)


def test_the_blocks_of_a_cut_are_verified_once(monkeypatch):
    """Plans that differ in their order, and programs of another schedule, share what was found."""
    joint = differentiate(small_mlp())
    program = laid_out(joint, mesh_of(2, 1, 2), schedule("1f1b", 2, 2))
    monkeypatch.setattr("distsim.program.parts.verify_reads", lambda *_: pytest.fail("verified again"))
    laid_out(joint, mesh_of(2, 1, 2), schedule("gpipe", 2, 2))
    replace(program, schedule=schedule("gpipe", 2, 4))
