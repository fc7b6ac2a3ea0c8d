"""Kernels that multiprocessors bound, not the memory: what they take, and what does not count."""

from dataclasses import replace

import pytest

from distsim.cost import CostModel
from distsim.cost.roofline import COLUMN_SUM, CYCLES, element_seconds
from distsim.hardware import load_cluster
from distsim.ir import Attributes, BFloat16, Device, Float32, FunctionMaker, Tensor, Topology
from distsim.ir.kernel_rates import KernelRates
from distsim.ir.type import Float8E4M3FN
from distsim.ops import Signature, signature_of, types
from distsim.ops.kernel import kernel_attributes
from distsim.ops.onnx_bridge import type_number
from distsim.ops.operator import AGAIN

FAST = Device(0, "gpu", 1e15, 1e15, 0.0, rates=KernelRates(processors=100, clock=1e9))
"""A memory that takes next to no time, and 1e11 cycles a second."""


def seconds(device, op_type, *shapes, dtype=BFloat16(), others=None, **attributes):  # noqa: B008
    kinds = others or [dtype] * len(shapes)
    given = tuple(Tensor(kind, shape) for kind, shape in zip(kinds, shapes, strict=True))
    options = Attributes(attributes)
    made = tuple(types(op_type, options, given, None))
    topology = Topology.hierarchical(device, 1, [])
    return CostModel(topology).seconds(Signature(op_type, options, given, made), tuple(topology.devices))


@pytest.mark.parametrize(("dtype", "place"), [(BFloat16(), 0), (Float32(), 1)])
@pytest.mark.parametrize("op", ["Gelu", "LayerNormalization", "LogSoftmax"])
def test_elements_take_cycles(op, dtype, place):
    shapes = [(1000, 1000)] + [(1000,)] * 2 * (op == "LayerNormalization")
    expected = 1e6 * CYCLES[op][place] / 1e11
    assert seconds(FAST, op, *shapes, dtype=dtype) == pytest.approx(expected, rel=1e-6)


def test_only_what_widens_is_converted_one_by_one():
    widening = seconds(FAST, "Cast", (1000, 1000), to=type_number(Float32()))
    assert widening == pytest.approx(1e6 * CYCLES["Cast"][1] / 1e11)
    narrowing = seconds(FAST, "Cast", (1000, 1000), dtype=Float32(), to=type_number(BFloat16()))
    assert narrowing < widening / 100


def test_gradients_are_converted_as_other_tensors_are():
    to = {"to": type_number(Float32())}
    cast = seconds(FAST, "GradientCast", (1000, 1000), **to)
    assert cast == seconds(FAST, "Cast", (1000, 1000), **to)
    added = seconds(FAST, "AccumulateInto", (1000, 1000), (1000, 1000), others=[Float32(), BFloat16()])
    assert added == pytest.approx(1e6 * CYCLES["Cast+Add"][1] / 1e11)
    assert seconds(FAST, "AccumulateInto", (1000, 1000), (1000, 1000)) < added / 100


@pytest.mark.parametrize(("anew", "cycles"), [(1, CYCLES["Float8Turn"][0]), (0, 0.0)])
def test_casts_along_columns_make_each_scale_anew_in_a_compiler_s_kernels(anew, cycles):
    taken = seconds(FAST, "Float8Turn", (1000, 1000), dtype=Float8E4M3FN(), rows=1, anew=anew)
    assert taken == pytest.approx(max(1e6 * cycles / 1e11, 5e6 / 1e15), rel=0.2)


def test_operands_that_are_smaller_are_looked_up():
    assert seconds(FAST, "Mul", (64, 100, 100), (100, 100)) == pytest.approx(6.4e5 * 0.8 / 1e11)
    assert seconds(FAST, "Mul", (64, 100, 100), ()) < 1e-8
    assert seconds(FAST, "Mul", (64, 100, 100), (64, 100, 100)) < 1e-8


@pytest.mark.parametrize("op", ["LayerNormalizationGrad", "RMSNormalizationGrad"])
def test_gradients_of_norms_that_one_kernel_makes_are_not_known(op):
    shapes = [(1000, 1000), (1000,), (1000, 1000)]
    two = seconds(FAST, op, *shapes, **{AGAIN: 1})
    assert two == pytest.approx(1e6 * CYCLES[op][0] / 1e11)
    assert seconds(FAST, op, *shapes) < two / 100


@pytest.mark.parametrize(("dtype", "place"), [(BFloat16(), 0), (Float32(), 1)])
def test_updates_of_many_tensors_go_through_all_parameters(dtype, place):
    maker, shape = FunctionMaker("updates"), (100, 1000)
    for number in range(7):
        given = [maker.add_input_value(f"{name}{number}", Tensor(dtype, shape)) for name in "wgmv"]
        maker.add("AdamOptimizer", given, {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8})
    one, ops = signature_of(maker.ops[0]), maker.ops
    attributes = kernel_attributes(ops)
    many = Signature("Kernel", attributes, one.inputs * 7, one.outputs * 7)
    cycles = CYCLES["AdamOptimizer"][place]
    assert element_seconds(one, FAST) == pytest.approx(1e5 * cycles / 1e11)
    assert element_seconds(many, FAST) == pytest.approx(7e5 * cycles / 1e11)


def test_kernels_of_several_ops_have_what_any_kernel_evaluates():
    x = Tensor(BFloat16(), (1000, 1000))
    for ops, cycles in (("Add+Gelu", CYCLES["Gelu"][0]), ("Cast+Mul+LayerNormalization", 0.0)):
        attributes = Attributes({"ops": ops, "flops": 1.0, "matrix": False})
        which = Signature("Kernel", attributes, (x,), (x,))
        found = element_seconds(which, FAST)
        assert found == pytest.approx(1e6 * cycles / 1e11)


@pytest.mark.parametrize(("rows", "share"), [(8192, 1.0), (65536, 1.0), (1024, 0.125**0.3)])
def test_sums_over_rows_wait(rows, share):
    waits = COLUMN_SUM * share / 1e9
    assert seconds(FAST, "ReduceSum", (rows, 64), axes=(0,), keepdims=0) == pytest.approx(waits, rel=1e-3)
    assert seconds(FAST, "ReduceSum", (rows, 64), axes=(1,), keepdims=0) < waits / 1000
    assert seconds(FAST, "ReduceSum", (rows, 64), axes=(0, 1), keepdims=0) < waits / 1000


def test_the_slower_of_memory_and_multiprocessors_counts():
    slow = replace(FAST, dram_bandwidth=1e11, bytes_efficiency=1.0)
    assert seconds(slow, "Gelu", (1000, 1000)) == pytest.approx(4e6 / 1e11)


@pytest.mark.parametrize("unknown", [{"clock": 0.0}, {"processors": 0}])
def test_nothing_is_assumed_of_a_device_that_does_not_say(unknown):
    device = replace(FAST, rates=replace(FAST.rates, **unknown))
    assert seconds(device, "Gelu", (1000, 1000)) == pytest.approx(5e6 / 1e15)  # its flops


def test_presets_say_their_clocks():
    assert load_cluster("dgx-h200").devices[0].rates.clock == 1.98e9
    assert load_cluster("dgx-1").devices[0].rates.clock == 1.53e9
