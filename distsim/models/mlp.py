"""Multi-layer perceptrons."""

from __future__ import annotations

from itertools import pairwise

from distsim.ir import DType, Float32, Function, FunctionMaker, Role, Tensor
from distsim.models.sizes import check_elements, check_layers, check_sizes


def mlp(
    layers: int = 16,
    width: int = 8192,
    batch: int = 8192,
    input_width: int | None = None,
    output_width: int | None = None,
    dtype: DType | str = Float32(),  # noqa: B008
) -> Function:
    """Return an MLP of ``layers`` times MatMul and Relu with a squared-error loss.

    Inputs: x [batch, input_width], target [batch, output_width] and one weight per layer (no biases,
    as in the DistIR notebooks); output: the scalar loss, sum((y - target)^2) / batch. Two inner layers
    make a block, the unit that repeats (so that tensor parallelism may treat them differently: the
    first by columns, the second by rows); blocks of equal shape are Calls of one callee. Raises
    :class:`PlanError` for sizes beyond those of :mod:`distsim.models.sizes`.

    >>> from distsim.ir import count_ops
    >>> count_ops(mlp(layers=4, width=8, batch=2))
    9
    """
    first = width if input_width is None else input_width
    last = width if output_width is None else output_width
    check_sizes(layers=layers, width=width, batch=batch, input_width=first, output_width=last)
    check_layers(layers)
    maker = FunctionMaker("mlp")
    widths = [first, *[width] * (layers - 1), last]
    x = maker.add_input_value("x", Tensor(dtype, (batch, first)))
    target = maker.add_input_value("target", Tensor(dtype, (batch, last)))
    shapes = list(pairwise(widths))
    check_elements((f"w{i} ({rows} x {columns})", rows * columns) for i, (rows, columns) in enumerate(shapes))
    weights = [
        maker.add_input_value(f"w{i}", Tensor(dtype, shape), Role.PARAMETER) for i, shape in enumerate(shapes)
    ]
    made: dict[tuple[tuple[int, int], ...], Function] = {}
    for start in range(0, layers, 2):
        block = tuple(shapes[start : start + 2])
        if block not in made:
            made[block] = _block(batch, block, dtype)
        inputs = [x, *weights[start : start + 2]]
        x = maker.add(
            "Call", inputs, None, (made[block],), [f"a{start + len(block) - 1}"], None, f"block{start}"
        )[0]
    loss = maker.add("Loss", [x, target], {"N": batch}, output_names=["loss"])
    maker.set_outputs(loss)
    return maker.finalize()


def _block(batch: int, shapes: tuple[tuple[int, int], ...], dtype: DType | str) -> Function:
    maker = FunctionMaker("block_" + "_".join(f"{rows}x{columns}" for rows, columns in shapes))
    x = maker.add_input_value("x", Tensor(dtype, (batch, shapes[0][0])))
    for index, shape in enumerate(shapes):
        weight = maker.add_input_value(f"w{index}", Tensor(dtype, shape), Role.PARAMETER)
        y = maker.add("MatMul", [x, weight], output_names=[f"y{index}"])
        x = maker.add("Relu", y, output_names=[f"a{index}"])[0]
    return maker.finalize()
