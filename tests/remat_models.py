"""Small training steps to recompute, the policies there are, and what is asked of the results."""

from functools import cache

from training_models import (
    F64,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
)

from distsim.executor import SequentialExecutor
from distsim.ir import Function, Topology, verify
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, DropoutRates, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.transforms import (
    SGD,
    Adam,
    differentiate,
    split_joint,
)
from distsim.transforms.kernels.attention import set_attention

WHOLE = ("full", "full_early", "every:2", "every_early:2")
LISTED = ("ops:MatMul+Softmax", "ops:Attention+Relu+Add")
POLICIES = ("none", "matmuls", *WHOLE, *LISTED, "min_cut", "budget:0", "budget:0.5", "budget:1")
DROPOUT = DropoutRates(0.1, 0.1, 0.1)


def dropping(attention: str) -> Function:
    """A GPT with dropout, whose masks are saved or drawn again."""
    sizes = DecoderSizes(
        3,
        8,
        16,
        GroupedHeads(2, bias=True, out_bias=True),
        FeedForward(16, "gelu", False, True),
        norm=Norm("layer"),
        positions=Positions(6, learned=True),
        dropout=DROPOUT,
        names=GPT_NAMES,
    )
    return decoder(sizes, 4, 6, F64, attention=attention)


ATTENDING = {
    "gpt": small_gpt,
    "llama": lambda: small_llama(layers=3),
    "flash": lambda: set_attention(small_llama(layers=3), "flash"),
    "dropout": lambda: dropping("math"),
    "dropout, flash": lambda: dropping("flash"),
}


MODELS = {
    "mlp": lambda: differentiate(small_mlp(layers=6), SGD(lr=0.1)),
    "gpt": lambda: differentiate(small_gpt(), Adam()),
    "llama": lambda: differentiate(small_llama(layers=3), Adam()),
}


@cache
def case(name: str):
    joint = MODELS[name]()
    inputs = random_inputs(joint, 0)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


def recomputed(function: Function) -> Function:
    verify(function)
    return function


def names(function: Function) -> list[str]:
    return [value.name for value in split_joint(function).saved]


def cluster(count: int, gbps: float) -> Topology:
    topology = Topology()
    devices = [topology.add_device("gpu", 1e12, 1e12, 1e-6) for _ in range(count)]
    for i, one in enumerate(devices):
        for other in devices[i + 1 :]:
            topology.set_bandwidth(one, other, gbps)
    return topology
