"""What a layer saves for backward, to the byte, by the published formulas.

s tokens, b samples, h width, a heads, f inner width of the feed-forward, t tensor-parallel ranks, 2 bytes an
element. Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(2205.05198), table 2, counts no statistics of norms (backward takes them again here) and no log-sum-exp of
flash attention (4abs bytes, counted beside).

A layer is the difference between a model of four layers and one of three, of the activations at the peak of
one microbatch in flight.
"""

from dataclasses import replace
from functools import cache

import pytest

from distsim.compose import parallelize
from distsim.hardware import load_cluster
from distsim.ir import BFloat16, Function
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, DropoutRates, Positions
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.plan import Plan
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, differentiate, inline, rematerialize, split_joint
from distsim.transforms.kernels import KERNELS

B, S, H, A, GROUPS, F = 16, 128, 64, 4, 2, 176
SBH = S * B * H
LOG_SUM_EXP = 4 * A * B * S
CLUSTER = load_cluster("dgx-a100")

GPT = DecoderSizes(
    layers=3,
    hidden=H,
    vocab=64,
    attention=GroupedHeads(A, bias=True, out_bias=True),
    feed_forward=FeedForward(None, "gelu", gated=False, bias=True),
    norm=Norm("layer"),
    positions=Positions(S, learned=True),
    names=GPT_NAMES,
)
DROPPING = replace(GPT, dropout=DropoutRates(0.1, 0.1, 0.1))
LLAMA = DecoderSizes(
    layers=3, hidden=H, vocab=64, attention=GroupedHeads(A, GROUPS), feed_forward=FeedForward(F)
)


@cache
def joint(sizes: DecoderSizes, attention: str) -> Function:
    return differentiate(decoder(sizes, B, S, BFloat16(), attention=attention), SGD(lr=0.1))


def peaks(sizes: DecoderSizes, attention: str, plan: Plan, kernels: str = "ops") -> dict[str, int]:
    """The bytes at the peak by kind; of all ranks alike."""
    program = parallelize(joint(sizes, attention), plan, CLUSTER, kernels=KERNELS[kernels])
    first, *rest = program_memory(program).devices.values()
    assert all(each.by_kind == first.by_kind for each in rest)
    return dict(first.by_kind)


def layer(sizes: DecoderSizes, attention: str, plan: Plan, kernels: str = "ops") -> int:
    """The bytes that one layer adds to the activations at the peak."""
    four = replace(sizes, layers=4)
    more, fewer = (peaks(each, attention, plan, kernels) for each in (four, sizes))
    grown = {kind for kind in more if more[kind] != fewer[kind]}
    buffers = {"gradients"} if KERNELS[kernels].zeroed == "all" else set[str]()
    assert grown == {"parameters", "activations"} | buffers, "the peak of both is where backward begins"
    return more["activations"] - fewer["activations"]


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize(
    ("remat", "inside", "divided", "scores"),
    [("none", 10, 24, 5), ("attention", 10, 24, 0), ("full", 2, 0, 0), ("full_early", 2, 0, 0)],
)
def test_a_layer_with_dropout_and_gelu(remat: str, inside: int, divided: int, scores: int, t: int) -> None:
    """sbh (10 + 24/t + 5as/(ht)); without the scores if selective; the input alone if full."""
    expected = inside * SBH + divided * SBH // t + scores * A * S * S * B // t
    assert layer(DROPPING, "math", Plan(tp=t, remat=remat)) == expected


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("attention", ["math", "flash"])
def test_a_layer_with_sequence_parallelism(attention: str, t: int) -> None:
    """Table 2: sbh 34 / t with attention recomputed, dropout and its masks included."""
    assert layer(DROPPING, attention, Plan(tp=t, sp="on", remat="attention")) == 34 * SBH // t


def test_a_layer_without_dropout() -> None:
    """Of 34 + 5as/h no masks: one byte for each branch and one for each score; and probabilities once."""
    assert layer(GPT, "math", Plan()) == 32 * SBH + 2 * A * S * S * B
    assert layer(GPT, "math", Plan(remat="attention")) == 32 * SBH


@pytest.mark.parametrize(("sizes", "masks"), [(DROPPING, 2), (GPT, 0)])
def test_a_layer_with_flash_attention(sizes: DecoderSizes, masks: int) -> None:
    """No scores, but the log-sum-exp. What the kernel makes is what the output projection reads."""
    assert layer(sizes, "flash", Plan()) == (32 + masks) * SBH + LOG_SUM_EXP
    assert layer(sizes, "flash", Plan(remat="attention")) == (32 + masks) * SBH


def test_a_layer_with_swiglu_and_grouped_heads() -> None:
    """sbh (2 norm + 2 qkv in + 2 q + 4r kv + 2 out + 2 norm + 2 mlp in) and of the feed-forward gate, its
    swish, up and their product: 8sbf, where a fused SwiGLU, which makes the swish again, saves 6sbf.
    """
    heads = (12 + 4 * GROUPS // A) * SBH
    assert layer(LLAMA, "math", Plan()) == heads + 8 * S * B * F + 2 * A * S * S * B
    assert layer(LLAMA, "math", Plan(remat="attention")) == heads + 8 * S * B * F
    assert layer(LLAMA, "flash", Plan()) == heads + 8 * S * B * F + LOG_SUM_EXP
    assert layer(LLAMA, "math", Plan(remat="ops:MatMul")) == (2 + 2 + 4 * GROUPS // A + 2 + 2) * SBH + (
        4 * S * B * F + 2 * A * S * S * B
    )


@pytest.mark.parametrize(("kernels", "inner"), [("eager", 8), ("fused", 6), ("compiled", 6)])
def test_a_fused_swiglu_saves_what_it_reads_and_its_product(kernels: str, inner: int) -> None:
    """Gate, up and product; what the activation makes is made again where it is read (layouts: 6sbf).

    A block that runs again as a whole makes no more than that at once.
    """
    heads = (12 + 4 * GROUPS // A) * SBH
    for t in (1, 2):
        inputs = heads if t == 1 else 8 * SBH + (4 + 4 * GROUPS // A) * SBH // t
        assert layer(LLAMA, "flash", Plan(tp=t), kernels) == (inputs + (inner * S * B * F + LOG_SUM_EXP) // t)
        assert layer(LLAMA, "flash", Plan(tp=t, remat="full"), kernels) == 2 * SBH


@pytest.mark.parametrize(("kernels", "swish"), [("ops", 1), ("fused", 0)])
def test_parts_that_run_again_are_not_saved(kernels: str, swish: int) -> None:
    """Of norms what they make, of SwiGLU its product, and its swish where that is a kernel of its own."""

    def saved(parts: str) -> int:
        whole = layer(LLAMA, "flash", Plan(), kernels)
        return whole - layer(LLAMA, "flash", Plan(remat=f"parts:{parts}"), kernels)

    assert saved("norms") == 4 * SBH
    assert saved("activations") == 2 * (1 + swish) * S * B * F
    assert saved("attention") == LOG_SUM_EXP
    assert saved("norms+activations") == saved("norms") + saved("activations")


@pytest.mark.parametrize("kernels", ["eager", "fused", "compiled"])
@pytest.mark.parametrize(("sizes", "masks"), [(DROPPING, 2), (GPT, 0)])
def test_kernels_save_what_the_formulas_say(sizes: DecoderSizes, masks: int, kernels: str) -> None:
    """A bias that a kernel of a GELU adds is added again: as many bytes are saved, of what came in."""
    assert layer(sizes, "flash", Plan(), kernels) == (32 + masks) * SBH + LOG_SUM_EXP
    assert layer(sizes, "flash", Plan(remat="attention"), kernels) == (32 + masks) * SBH
    if masks:
        assert layer(sizes, "flash", Plan(tp=2, remat="attention"), kernels) == (10 + 24 // 2) * SBH


def test_a_block_that_runs_again_needs_its_own_working_set_once() -> None:
    """Of L layers 2sbh each and the embedding's mask; of the one that runs again what it saves but its input,
    beside what the backward pass of a layer takes anyway, however many layers there are.
    """
    one = layer(DROPPING, "math", Plan())
    none = peaks(DROPPING, "math", Plan())
    for layers in (3, 4):
        full = peaks(replace(DROPPING, layers=layers), "math", Plan(remat="full"))
        loss = 512  # one number, in a block of its own
        assert full["activations"] == (2 * layers + 1) * SBH + loss
        assert one - 2 * SBH <= full["workspace"] <= one - 2 * SBH + none["workspace"]


@pytest.mark.parametrize("remat", ["none", "attention", "full", "ops:MatMul+Softmax"])
@pytest.mark.parametrize("sizes", [DROPPING, LLAMA], ids=["gpt", "llama"])
def test_what_is_in_memory_is_what_is_saved(sizes: DecoderSizes, remat: str) -> None:
    """The values that pass from forward to backward, written out, sum to the same."""
    models = [decoder(each, B, S, BFloat16(), attention="math") for each in (sizes, replace(sizes, layers=4))]
    joints = [rematerialize(differentiate(model, None), remat) for model in models]
    three, four = (split_joint(inline(each)) for each in joints)
    assert four.nbytes - three.nbytes == layer(sizes, "math", Plan(remat=remat))
