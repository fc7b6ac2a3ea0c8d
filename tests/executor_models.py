"""What the tests of the executor share: clusters and small functions."""

from distsim.executor import (
    CostModel,
    Simulator,
)
from distsim.ir import Float, FunctionMaker, Role, Tensor, Topology
from distsim.ops import Operator, Work, register, signature_of

FLOPS, DRAM, LAUNCH, GBPS = 1e13, 1e12, 1e-5, 80  # 80 Gbit/s: 1e10 bytes/s


def cluster(count, launch=LAUNCH, gbps=GBPS, latency=0.0):
    topology = Topology()
    devices = [topology.add_device("gpu", FLOPS, DRAM, launch) for _ in range(count)]
    for i, a in enumerate(devices):
        for b in devices[i + 1 :]:
            topology.set_bandwidth(a, b, gbps, latency)
    return topology, devices


def f32(*shape, on=None):
    return Tensor(Float(), shape, on)


def simulate(topology, function, **options):
    return Simulator(CostModel(topology), **options).interpret(function, function.inputs)


def add_grad(maker, a, b):
    return maker.add_op("LossGrad", inputs=[a, b], attributes={"N": 1})


register(
    Operator(
        "TestFree", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0]], work=lambda s: Work(0, 0, 0)
    )
)


register(
    Operator(
        "TestWork", types=lambda a, x: (x[0],), work=lambda s: Work(s.attributes["flops"], 0, 0, matrix=True)
    )
)


register(Operator("TestUnknown", types=lambda a, x: (x[0],)))


register(Operator("TestView", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0]], view=True))


register(Operator("TestWrong", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0][:1]]))


# --- infer_types -------------------------------------------------------------------------------------


def layers(depth=3, mesh=None):
    """A callee called `depth` times, with a weight each."""
    inner = FunctionMaker("layer")
    x = inner.add_input_value("x", f32(4, 8, on=mesh))
    w = inner.add_input_value("w", f32(8, 8, on=mesh), Role.PARAMETER)
    y = inner.add_op("MatMul", inputs=[x, w])
    inner.add_op("LossGrad", inputs=[y, y], attributes={"N": 4})
    layer = inner.finalize()
    maker = FunctionMaker("model")
    h = maker.add_input_value("x", f32(4, 8, on=mesh))
    for i in range(depth):
        w = maker.add_input_value(f"w{i}", f32(8, 8, on=mesh), Role.PARAMETER)
        h = maker.add_op("Call", inputs=[h, w], subfunctions=[layer])
    return maker.finalize()


# --- CostModel ---------------------------------------------------------------------------------------


def signature(op_type, *inputs, **attributes):
    maker = FunctionMaker("f")
    values = [maker.add_input_value(f"x{i}", type_) for i, type_ in enumerate(inputs)]
    maker.add(op_type, values, attributes)
    return signature_of(maker.ops[0])
