"""Rotary embeddings that are written out: found by what they compute, run as one kernel, and nothing else."""

import pytest
from training_models import random_inputs

from distsim.interpret import SequentialExecutor
from distsim.ir import Float, Function, FunctionMaker, Role, Tensor, verify
from distsim.ops import op_label, signature_of, work
from distsim.transforms import SGD, differentiate
from distsim.transforms.autodiff.set_precision import set_precision
from distsim.transforms.kernels import KERNELS, fuse
from distsim.transforms.kernels.rotary import rotations

SHAPE, WIDTH = (2, 3, 5, 8), 8


class Writer:
    """Writes a function of x and the tables cos and sin."""

    def __init__(self, width: int) -> None:
        self.maker = FunctionMaker("f")
        self.x = self.maker.add_input_value("x", Tensor(Float(), SHAPE))
        self.cos, self.sin = (self.maker.add_input_value(n, Tensor(Float(), (5, width))) for n in ("c", "s"))

    def __call__(self, op_type: str, *inputs, **attributes):
        return self.maker.add(op_type, inputs, attributes)[0]

    def halves(self, value):
        return self.maker.add("Split", [value], {"axis": -1, "num_outputs": 2})

    def slices(self, value, *cuts):
        return [self("Slice", value, axes=[3], starts=[a], ends=[b], steps=[step]) for a, b, step in cuts]

    def summed(self, turned) -> Function:
        return self.returning(self("Add", self("Mul", self.x, self.cos), self("Mul", turned, self.sin)))

    def returning(self, value) -> Function:
        self.maker.set_outputs([value])
        return self.maker.finalize()


def of_halves(sign: int = 1) -> Function:
    write = Writer(WIDTH)
    first, second = write.halves(write.x)
    pair = (write("Neg", second), first) if sign > 0 else (second, write("Neg", first))
    return write.summed(write("Concat", *pair, axis=-1))


def of_slices() -> Function:
    write = Writer(WIDTH)
    first, second = write.slices(write.x, (0, 4, 1), (4, 2**31, 1))
    return write.summed(write("Concat", write("Neg", second), first, axis=3))


def half_by_half() -> Function:
    write = Writer(WIDTH // 2)
    first, second = write.halves(write.x)
    one = write("Sub", write("Mul", first, write.cos), write("Mul", second, write.sin))
    other = write("Add", write("Mul", write.sin, first), write("Mul", write.cos, second))
    return write.returning(write("Concat", one, other, axis=-1))


def swapped_without_a_sign() -> Function:
    write = Writer(WIDTH)
    first, second = write.halves(write.x)
    return write.summed(write("Concat", second, first, axis=-1))


def not_of_halves() -> Function:
    write = Writer(WIDTH)
    first, second = write.slices(write.x, (0, 2, 1), (2, 8, 1))
    return write.summed(write("Concat", write("Neg", second), first, axis=-1))


def over_the_sequence() -> Function:
    write = Writer(WIDTH)
    first, second = write.slices(write.x, (0, 4, 1), (4, 8, 1))
    rest = write("Slice", write.x, axes=[2], starts=[0], ends=[5], steps=[1])
    turned = write("Concat", write("Neg", second), first, axis=-1)
    return write.returning(write("Add", write("Mul", rest, write.cos), write("Mul", turned, write.sin)))


def scaled_and_shifted() -> Function:
    write = Writer(WIDTH)
    return write.returning(write("Add", write("Mul", write.x, write.cos), write.sin))


def joined_scaled_and_split() -> Function:
    write = Writer(2 * WIDTH)
    scaled = write("Mul", write("Concat", write.x, write.x, axis=-1), write.cos)
    return write.returning(write("Add", *write.halves(scaled)))


@pytest.mark.parametrize("write", [of_halves, of_slices, half_by_half, lambda: of_halves(-1)])
def test_a_rotary_embedding_is_one_kernel_forward_and_backward(write):
    function = write()
    assert rotations(function.ops) == [tuple(range(len(function.ops)))]
    assert len(fuse(function, KERNELS["fused"]).function.ops) == 1
    assert len(fuse(function, KERNELS["eager"]).function.ops) == len(function.ops)


def test_what_follows_from_a_late_table_is_still_one_kernel():
    """A table that a longer chain of kernels makes than x: the kernel waits for it."""
    write = Writer(WIDTH)
    x, cos = write("Softmax", write.x), write.cos
    for _ in range(4):
        cos = write("Softmax", cos)
    first, second = write.halves(x)
    turned = write("Concat", write("Neg", second), first, axis=-1)
    function = write.returning(write("Add", write("Mul", x, cos), write("Mul", turned, write.sin)))
    fused = fuse(function, KERNELS["fused"]).function
    verify(fused)
    assert [op_label(op) for op in fused.ops] == ["Softmax"] * 5 + ["Split+Neg+Concat+Mul+Mul+Add"]
    inputs = random_inputs(function)
    for one, other in zip(*(SequentialExecutor().compute(f, inputs) for f in (function, fused)), strict=True):
        assert (one == other).all()


def test_the_gradients_of_a_layer_turn_back_in_one_kernel():
    write = Writer(WIDTH)
    w = write.maker.add_input_value("w", Tensor(Float(), (8, 8)), Role.PARAMETER)
    x = write("MatMul", write.x, w)
    first, second = write.slices(x, (0, 4, 1), (4, 8, 1))
    turned = write("Concat", write("Neg", second), first, axis=-1)
    made = write("Add", write("Mul", x, write.cos), write("Mul", turned, write.sin))
    loss = write("ReduceMean", write("Mul", made, made), keepdims=0)
    joint = differentiate(write.returning(loss), SGD())
    assert len(rotations(joint.ops)) == 2


@pytest.mark.parametrize("kernels", ["eager_complex", "compiled_blocks", "compiled_complex"])
@pytest.mark.parametrize("write", [of_halves, of_slices, half_by_half])
def test_in_complex_numbers_it_is_a_cast_a_product_and_a_cast(write, kernels):
    """Twenty bytes an element of 16 bits: 2 + 4, 4 + 4 and 4 + 2, beside the tables."""
    function = set_precision(write(), "bfloat16")
    fused = fuse(function, KERNELS[kernels]).function
    verify(fused)
    assert [op.op_type for op in fused.ops] == ["Cast", "Kernel", "Cast"]
    demands = [work(signature_of(op)) for op in fused.ops]
    tables = sum(value.type.nbytes for value in function.inputs[1:])
    numbers = function.inputs[0].type.size
    assert sum(each.bytes_read + each.bytes_written for each in demands) == 20 * numbers + tables
    inputs = [
        x.astype(v.type.dtype.np) for x, v in zip(random_inputs(function), function.inputs, strict=True)
    ]
    for one, other in zip(*(SequentialExecutor().compute(f, inputs) for f in (function, fused)), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    "write", [swapped_without_a_sign, not_of_halves, over_the_sequence, scaled_and_shifted]
)
def test_what_only_looks_like_one_stays_as_it_is(write):
    function = write()
    assert rotations(function.ops) == []
    assert len(fuse(function, KERNELS["fused"]).function.ops) == len(function.ops)


def test_ops_of_one_kind_after_the_other_are_no_kernel():
    function = joined_scaled_and_split()
    assert len(fuse(function, KERNELS["fused"]).function.ops) == len(function.ops)


def test_what_others_read_is_not_inside():
    write = Writer(WIDTH)
    first, second = write.halves(write.x)
    turned = write("Concat", write("Neg", second), first, axis=-1)
    made = write("Add", write("Mul", write.x, write.cos), write("Mul", turned, write.sin))
    function = write.returning(write("Mul", made, write("Tanh", turned)))
    assert rotations(function.ops) == []
