"""Values of a layer that are saved by MaxText's names, and all else runs again."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from decoder_models import small
from expert_models import BATCH, DEEPSEEK, SEQ, SKEWED, computed_over_ranks
from training_models import F64, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.ir import all_ops
from distsim.models import mlp
from distsim.models.decoder import decoder
from distsim.plan import Plan
from distsim.plan.recomputation import NAMES
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.recompute.saved_names import SAVED_NAMES


def test_a_plan_may_ask_for_each_name():
    assert {*NAMES} == SAVED_NAMES.keys()


@cache
def trained(family, attention):
    return differentiate(small(family, 4, attention), Adam())


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "deepseek_v2"])
@pytest.mark.parametrize(
    ("attention", "plan", "names"),
    [
        ("flash", "dp=2,tp=2", "context+mlpwi"),
        ("math", "dp=2,tp=2", "qkv_proj+out_proj+mlpwo"),
        ("flash", "pp=2,microbatches=2,tp=2,sp=on", "qkv_proj+out_proj+mlpwo"),
        ("math", "pp=2,microbatches=2", "context+mlpwi"),
    ],
)
def test_every_rank_computes_the_same_step(family, attention, plan, names):
    computed_over_ranks(trained(family, attention), Plan.parse(f"{plan},remat=names:{names}"))


def again(joint, remat: str, plan: str = "") -> Counter[str]:
    """The ops that run again."""
    ways = (Plan.parse(f"{plan}remat={each}") for each in (remat, "none"))
    programs = (parallelize(joint, way, topology_of(2 if plan else 1)) for way in ways)
    own, other = (Counter(op.op_type for op in all_ops(p.to_function(steady=True))) for p in programs)
    return own - other


@pytest.mark.parametrize(
    ("names", "products", "attentions"),
    [  # of two layers of seven products: queries, keys, values, out, gate, up; down's nobody reads again
        ("qkv_proj", 3, 1),
        ("context", 6, 0),
        ("out_proj", 5, 1),
        ("mlpwi", 4, 1),
        ("mlpwo", 6, 1),
        ("qkv_proj+out_proj+mlpwo", 2, 1),
        ("qkv_proj+context+out_proj+mlpwi", 0, 0),
    ],
)
@pytest.mark.parametrize("family", ["llama", "llama biased"])
def test_what_runs_again(names, products, attentions, family):
    joint = differentiate(small(family, 2), SGD())
    found = again(joint, f"names:{names}")
    assert (found["MatMul"], found["Attention"]) == (2 * products, 2 * attentions)
    assert found["RMSNormalization"] == 4  # their results are read by the gradients of weights
    biases = {"qkv_proj": 3, "out_proj": 1, "mlpwi": 2}
    if family == "llama biased":
        bare = again(differentiate(small("llama", 2), SGD()), f"names:{names}")
        saved = sum(count for name, count in biases.items() if name in names.split("+"))
        assert found["Add"] - bare["Add"] == 2 * (sum(biases.values()) - saved)


def test_a_product_is_saved_behind_the_reduction_of_its_parts():
    joint = differentiate(small("llama", 2), SGD())
    whole, saved = (again(joint, remat, "tp=2,") for remat in ("full_early", "names:out_proj"))
    assert whole["MPIAllreduce"] - saved["MPIAllreduce"] == 2


def test_written_attention_is_saved_where_it_begins_and_ends():
    joint = differentiate(small("llama", 2, "math"), SGD())
    queries, context = (again(joint, f"names:{name}") for name in ("qkv_proj", "context"))
    assert (queries["Softmax"], queries["MatMul"]) == (2, 2 * (2 + 3))
    assert (context["Softmax"], context["MatMul"]) == (2, 2 * (1 + 3 + 3))


def test_a_block_without_what_is_named_is_refused():
    joint = differentiate(mlp(layers=4, width=8), SGD())
    with pytest.raises(PlanError, match=r"names:qkv_proj: a block has no qkv_proj"):
        parallelize(joint, Plan(remat="names:qkv_proj"), topology_of(1))


@cache
def of_experts(layers, groups):
    sizes = replace(DEEPSEEK, layers=layers, experts=replace(DEEPSEEK.experts, groups=groups))
    return differentiate(decoder(sizes, BATCH, SEQ, F64, SKEWED), Adam())


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,ep=2,tp=2,zero=3",
        "cp=2,cp_kind=ring,tp=2,sp=on",
        "pp=2,microbatches=4,chunks=2,schedule=interleaved",
        "pp=2,microbatches=4,schedule=zb_h1,tp=2",
    ],
)
def test_every_rank_computes_the_same_step_of_experts(plan):
    joint = of_experts(4 if "chunks" in plan else 3, 2 if "sp=on" in plan else 1)  # of 3 one is dense
    computed_over_ranks(joint, Plan.parse(f"{plan},remat=names:qkv_proj+mlpwi"))


def test_experts_have_their_products_by_name():
    """A gate and what it gates, of a layer, of experts and of the shared one. What experts make at last the
    gradient of their gates reads: of their products that one runs again in place of two."""
    joint = differentiate(decoder(replace(DEEPSEEK, layers=2), BATCH, SEQ, F64, SKEWED), SGD())
    last, first = (again(joint, f"names:{name}") for name in ("mlpwo", "mlpwi"))
    assert last["MatMul"] - first["MatMul"] == 2 + 2
    assert (last["GroupedMatMul"], first["GroupedMatMul"]) == (2, 1)
