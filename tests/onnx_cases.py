"""What the tests of ONNX models share."""

from distsim.ir import Function, Value

LEARNING_RATE = 0.01


def running_statistics(function: Function) -> set[Value]:
    """The mean and the variance of each batch normalisation: stored, but not trained."""
    return {v for op in function.ops if op.op_type == "BatchNormalization" for v in op.inputs[3:5]}
