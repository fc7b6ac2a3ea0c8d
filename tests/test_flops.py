"""The FLOPs of the model, MFU's numerator, and every policy with attention as one kernel and written out."""

import numpy as np
import pytest
from precision_models import rounded
from training_models import random_inputs

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.importer.decoders import decoder_sizes
from distsim.interpret import SequentialExecutor, count_flops, count_model_flops
from distsim.ir import Attributes
from distsim.models import llama
from distsim.models.decoder import count_parameters
from distsim.ops import compute
from distsim.ops.attention_options import ATTENTIONS
from distsim.plan import Plan
from distsim.simulation import Simulator
from distsim.transforms import SGD, Adam, add_loss, differentiate, precision_named
from distsim.transforms.autodiff.precision import POLICIES
from distsim.transforms.kernels.attention import set_attention
from distsim.transforms.kernels.composites import merge_composites


def small_llama(attention):
    return set_attention(llama(2, 8, 2, seq=4, batch=8, vocab=16, kv_heads=1, ffn=16), attention)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("llama3-8b:layers=2", 128 * 128),
        ("mistral-7b:layers=2,window=256", 128 * 128),
        ("mistral-7b:layers=2,window=64", 128 * 127 - 64 * 63),  # the diagonal, and 63 on each side of it
    ],
)
def test_a_token_takes_six_flops_a_weight_and_twelve_for_attention(name, pairs):
    """6 N + 12 L h s (Chowdhery et al. 2022, appendix B), N being the weights of products."""
    seq, sizes = 128, decoder_sizes(name)[0]
    function = load_model(name, 1, f"seq={seq}")
    weights = sum(v.type.size for v in function.parameters if len(v.type.shape) == 2)
    weights -= sizes.vocab * sizes.hidden  # the embedding is looked up
    expected = 6 * weights * seq + 12 * sizes.layers * sizes.hidden * pairs
    assert count_parameters(sizes).params > weights
    assert count_model_flops(differentiate(function, Adam())) == expected


@pytest.mark.parametrize("name", ["mixtral-8x7b:layers=1", "deepseek-v2-lite:layers=2"])
def test_the_models_flops_are_of_the_experts_that_tokens_choose_whatever_their_capacity(name):
    def counted(options):
        function = differentiate(load_model(f"{name},concentration=1{options}", 1, "seq=64"), Adam())
        return count_model_flops(function), count_flops(function)

    every = [counted(options) for options in ("", ",capacity=1", ",capacity=4", ",capacity=4,pad=false")]
    assert [model for model, _ in every] == pytest.approx([every[0][0]] * 4, rel=1e-12)
    assert every[1][1] < every[0][1] < every[2][1]
    assert every[3][1] <= every[0][1]


@pytest.mark.parametrize("name", ["llama3-8b:layers=1", "gpt2", "deepseek-v2-lite:layers=2"])
def test_the_models_flops_do_not_depend_on_how_it_runs(name):
    function = merge_composites(load_model(name, 1, "seq=64"))
    found = {}
    for attention in ATTENTIONS:
        forward = add_loss(set_attention(function, attention))
        for policy in (None, "mixed", "fp8", "amp"):
            precision = None if policy is None else precision_named(policy)
            joint = differentiate(forward, Adam(), precision=precision, clip=1.0)
            found[attention, policy] = count_model_flops(joint)
            assert count_flops(joint) != found[attention, policy]
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_computes_and_is_simulated_with_either_attention(policy):
    exact = differentiate(small_llama("math"), SGD(lr=1.0))
    inputs = [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(exact, 2)]
    by_name = dict(zip([v.name for v in exact.inputs], inputs, strict=True))
    costs = CostModel(load_cluster("dgx-h100"))
    wanted = float(SequentialExecutor().compute(exact, rounded(exact, inputs))[0])
    for attention in ATTENTIONS:
        joint = differentiate(small_llama(attention), SGD(lr=1.0), precision=precision_named(policy))
        given = [by_name[v.name.removesuffix(".master")] for v in joint.inputs]
        results = SequentialExecutor().compute(joint, rounded(joint, given))
        assert float(results[0]) == pytest.approx(wanted, rel=2e-2)
        assert all(np.isfinite(array.astype(float)).all() for array in results)
        program = parallelize(joint, Plan(dp=2), costs.topology, costs)
        assert Simulator(costs).simulate(program).step_time > 0


def test_tf32_rounds_what_is_multiplied_only():
    """Sums of exponentials keep their digits: the probabilities that are made again from them sum to 1."""
    rng = np.random.default_rng(0)
    qkv = [(rng.integers(-8, 9, (1, 2, 6, 4)) / 4).astype(np.float32) for _ in range(3)]  # few digits
    dy, bias = qkv[0][:, :, ::-1], rng.standard_normal((1, 1, 6, 6)).astype(np.float32)
    rate, plain = Attributes({"rate": "tfloat32"}), Attributes()
    made = compute("Attention", plain, None, [*qkv, bias], 2)
    cases = {"Attention": [*qkv, bias], "AttentionGrad": [*qkv, bias, *made, dy]}
    a, b = qkv[0][0, 0], qkv[1][0, 0].T
    cases["Gemm"] = [a, b, bias[0, 0]]
    for name, arrays in cases.items():
        exact, rounded_ = (compute(name, attributes, None, arrays, 1)[0] for attributes in (plain, rate))
        np.testing.assert_array_equal(rounded_, exact, err_msg=name)
