"""What backward kernels make again of the inside of forward kernels: fewest bytes, the same numbers."""

from itertools import combinations
from random import Random

import numpy as np
import pytest
from training_models import random_inputs

from distsim.interpret import SequentialExecutor
from distsim.ir import Float, Function, FunctionMaker, Role, Tensor, Value, verify
from distsim.ops import op_label
from distsim.transforms import differentiate, split_joint
from distsim.transforms.kernels import KERNELS, Kernels, fuse
from distsim.transforms.recompute.interiors import recompute_interiors
from distsim.transforms.recompute.joint import Joint

COMPILED = KERNELS["compiled"]
ROWS, WIDTH = 6, 4
ONE = 4 * ROWS * WIDTH  # bytes of a tensor


class Network:
    """x W, something element by element, and a product with V; the mean is the loss."""

    def __init__(self) -> None:
        self.maker = FunctionMaker("network")
        self.x = self.maker.add_input_value("x", Tensor(Float(), (ROWS, WIDTH)))
        self.h = self.product(self.x, "w")

    def product(self, source: Value, name: str) -> Value:
        weight = self.maker.add_input_value(name, Tensor(Float(), (WIDTH, WIDTH)), Role.PARAMETER)
        return self.maker.add_op("MatMul", inputs=[source, weight])

    def __call__(self, op_type: str, *inputs: Value) -> Value:
        return self.maker.add_op(op_type, inputs=inputs)

    def joint(self, result: Value) -> Function:
        mean = self.maker.add_op("ReduceMean", inputs=[self.product(result, "v")], attributes={"keepdims": 0})
        self.maker.set_outputs([mean])
        return differentiate(self.maker.finalize(), None)


def saved(function: Function) -> list[str]:
    return [value.name for value in split_joint(function).saved]


def test_a_gate_of_two_activations_saves_its_input() -> None:
    """tanh(h) sigmoid(h) saves both, whose gradients follow from them; fused h, which both follow from."""
    network = Network()
    joint = network.joint(network("Mul", network("Tanh", network.h), network("Sigmoid", network.h)))
    eager, fused = joint, recompute_interiors(joint, COMPILED)
    assert split_joint(eager).nbytes == 3 * ONE  # with the gate, for the product with V
    assert split_joint(fused).nbytes == 2 * ONE
    kernels = [op_label(op) for op in fuse(fused, COMPILED).function.ops if op.op_type == "Kernel"]
    assert kernels[0] == "Tanh+Sigmoid+Mul"
    assert fuse(fused, COMPILED).function.ops[1].outputs == (split_joint(fused).saved[1],), "nothing else"
    assert recompute_interiors(fused, COMPILED) is fused


def test_what_a_product_reads_is_saved() -> None:
    """No kernel of the backward pass can make it again: the product of the gradients is none."""
    network = Network()
    joint = network.joint(network("Sigmoid", network("Neg", network.h)))
    assert recompute_interiors(joint, COMPILED) is joint


@pytest.mark.parametrize("name", ["ops", "eager"])
def test_an_op_alone_in_its_kernel_saves_what_its_gradient_reads(name: str) -> None:
    network = Network()
    joint = network.joint(network("Mul", network("Tanh", network.h), network("Sigmoid", network.h)))
    assert recompute_interiors(joint, KERNELS[name]) is joint


def test_a_mask_is_not_drawn_again() -> None:
    network = Network()
    options = {"ratio": np.array(0.5), "training_mode": np.array(True), "seed": 1}
    drawn = network.maker.add_op("Dropout", inputs=[network("Neg", network.h)], attributes=options)
    joint = network.joint(network("Tanh", drawn))
    again = recompute_interiors(joint, COMPILED)
    assert sum(op.op_type == "Dropout" for op in again.ops) == 1


@pytest.mark.parametrize("seed", range(25))
def test_of_one_kernel_no_choice_saves_fewer_bytes(seed: int) -> None:
    """Random element by element ops in one kernel: the same gradients, and of all sets of values from which
    what backward reads follows none is smaller."""
    rng = Random(seed)
    network = Network()
    values = [network.h]
    for _ in range(rng.randint(3, 7)):
        kind = rng.choice(("Tanh", "Sigmoid", "Mul", "Add", "Exp", "Neg"))
        values.append(
            network(kind, *[rng.choice(values[-4:]) for _ in range(2 if kind in ("Mul", "Add") else 1)])
        )
    joint = network.joint(values[-1])
    everything = Kernels("everything", lambda first, second: _cheap(first) and _cheap(second), interiors=True)
    again = recompute_interiors(joint, everything)
    verify(again)
    inputs = random_inputs(joint, seed)
    for one, other in zip(*(SequentialExecutor().compute(f, inputs) for f in (joint, again)), strict=True):
        assert abs(one - other).max() == 0
    assert split_joint(again).nbytes == _fewest(joint)


def _cheap(op: object) -> bool:
    return getattr(op, "op_type", "") not in ("MatMul", "MatMulGrad", "ReduceMean")


def _fewest(joint: Function) -> int:
    """The bytes of the smallest set of forward values from which all that backward reads follows."""
    passes = Joint.of(joint)
    made = passes.made
    inside = [v for v, op in made.items() if _cheap(op)]
    heads = [v for v, op in made.items() if not _cheap(op)]
    readers = {v: [op for op in joint.ops if passes.behind(op) and v in op.inputs] for v in made}
    fixed = {v for v in inside if any(not _cheap(op) for op in readers[v])}
    wanted = {v for v in made if readers[v]}
    free = {*joint.inputs, *(v for op in passes.constants for v in op.outputs)}
    for count in range(len(made) + 1):
        for chosen in combinations([*inside, *heads], count):
            known = {*chosen, *free}
            for value in inside:
                if known.issuperset(made[value].inputs):
                    known.add(value)
            if wanted <= known and fixed <= set(chosen):
                return sum(v.type.nbytes for v in chosen)
    raise AssertionError("all of them would do")
