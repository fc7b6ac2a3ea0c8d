"""Small models with experts, and what is asked of every layout of them."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import training_models
from training_models import F64, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.ir import BFloat16, Function, all_ops
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes, ExpertLayers, Positions
from distsim.models.mixture import Mixture
from distsim.models.parts.attention import GroupedHeads, Latent
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.routing import Loads
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.transforms import SGD, differentiate

BATCH, SEQ, VOCAB = 8, 8, 16
MIXTRAL = DecoderSizes(
    2, 16, VOCAB, GroupedHeads(4, 2), FeedForward(24), Mixture(4, 2, 8), positions=Positions(SEQ)
)
DEEPSEEK = replace(
    MIXTRAL,
    attention=Latent(4, 0, 4, 4, 2, 4),
    experts=Mixture(4, 2, 8, 1, "sigmoid", 2.5),
    expert_layers=ExpertLayers(1),
)
EVEN = Loads()
SKEWED = Loads(concentration=1.0, capacity=1.5, seed=1, pad=False)
"""Unlike slots, so that parts are padded, and some choices dropped."""
PADDED = Loads(concentration=1.0, capacity=1.5, seed=1)
"""Slots alike, some of which hold nothing, and some choices dropped."""

LARGE = DecoderSizes(
    2, 2048, 64, GroupedHeads(16), FeedForward(64), Mixture(8, 2, 2048), positions=Positions(1024)
)
SENT = replace(MIXTRAL, layers=2, hidden=32, experts=Mixture(8, 2, 16))
H, K = SENT.hidden, SENT.experts.top_k


def model(name: str, groups: int = 1, loads: Loads = SKEWED) -> Function:
    sizes = {"mixtral": MIXTRAL, "deepseek": replace(DEEPSEEK, layers=3)}[name]
    sizes = replace(sizes, experts=replace(sizes.experts, groups=groups))
    return decoder(sizes, BATCH, SEQ, F64, loads)


def distinct_inputs(function: Function) -> list[np.ndarray]:
    """Inputs without equal tokens in a sequence: rounding says which of two is dropped."""
    tokens, *others = random_inputs(function)
    rng = np.random.default_rng(0)
    return [np.stack([rng.permutation(VOCAB)[: tokens.shape[1]] for _ in tokens]), *others]


def computed_over_ranks(joint: Function, plan: Plan, kernels: str = "ops") -> Program:
    """Return the program of a plan, as that function does, of inputs that leave no choice to rounding."""
    return training_models.computed_over_ranks(joint, plan, kernels, distinct_inputs)


def sent(program: Program) -> Counter[tuple[str, str, int]]:
    """The collectives of a step: kind, axis and bytes."""
    found: Counter[tuple[str, str, int]] = Counter()
    for op in all_ops(program.to_function(steady=True)):
        if (moved := operator(op.op_type).communication) is not None and operator(op.op_type).moves:
            found[moved.kind, op.attributes["axis"], moved.nbytes(signature_of(op))] += 1
    return found


@lru_cache(4)  # plans of one model follow each other
def trained(sizes: DecoderSizes, layers: int, loads: Loads) -> Function:
    return differentiate(decoder(replace(sizes, layers=layers), BATCH, SEQ, BFloat16(), loads), SGD())


def of_two_layers(plan: Plan, sizes: DecoderSizes = SENT, loads: Loads = EVEN) -> dict:
    def step(layers: int) -> Counter[tuple[str, str, int]]:
        return sent(parallelize(trained(sizes, layers, loads), plan, topology_of(plan.devices)))

    found = step(4)
    found.subtract(step(2))
    return {key: n for key, n in found.items() if n}
