"""A row of published measurements becomes a model and a plan by its columns, or names what is missing."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from truth_rows import GPT, LLAMA

from distsim.hardware.cluster_parts import speed_under_limit
from distsim.ir import Float8E4M3FN, all_ops
from distsim.models.decoder_sizes import DropoutRates
from distsim.ops.places import shape_of
from distsim.plan import Plan
from distsim.truth import MissingFeatureError, case_of
from distsim.truth.row import cell, decimal, number, plain

FIELDS = {field.name for field in fields(Plan)}


def test_a_row_of_megatron():
    case = case_of(GPT)
    assert case.plan == Plan(pp=4, microbatches=8, stages="default")
    assert (case.precision.name, case.attention, case.kernels) == ("mixed_fp16", "math", "fused_2021")
    assert case.sizes.vocab == 50304 and not case.sizes.tied
    assert case.sizes.dropout == DropoutRates(0.1, 0.1, 0.1)
    assert case.assumed == ("attention math", "vocabulary 50257", "dropout 0.1")


def test_a_row_without_a_precision_is_of_today_but_for_gpus_without_bfloat16():
    """An empty column is no fp16, in which Megatron-LM of 2021 trained: the stack's default, said aloud."""
    open_row = GPT | {"precision": ""}
    today = case_of(open_row | {"hw_gpu": "H100-SXM5-80GB", "gpu_mem_gb": "80"})
    assert (today.stack.name, today.precision.name, today.attention) == ("megatron", "mixed", "cudnn")
    assert "precision mixed" in today.assumed
    old = case_of(open_row | {"hw_gpu": "V100-SXM3-32GB", "gpu_mem_gb": "32"})
    assert (old.stack.name, old.precision.name) == ("megatron_2021", "mixed_fp16")
    assert case_of(GPT | {"hw_gpu": "H100-SXM5-80GB"}).stack.name == "megatron_2021"  # as it says fp16


def test_a_row_of_torchtitan():
    case = case_of(LLAMA)
    sharded = {"zero": 3, "reshard": "auto", "bucket": "fsdp2"}
    assert case.plan == Plan(dp=4, microbatches=2, remat="full_early", **sharded)
    assert case.precision.linear == Float8E4M3FN() and case.precision.used.itemsize == 2
    assert (case.attention, case.kernels, case.stack.name) == ("flash2", "eager_complex", "torchtitan")
    assert case.sizes.attention.groups == 2 and case.sizes.feed_forward.gated
    compiled = LLAMA | {"notes": "torch.compile"}
    assert case_of(compiled).kernels == "compiled_blocks"
    for url, kernels in (("h100_202412_titan.md", "blocks"), ("h100_2025-06_titan.md", "complex")):
        assert case_of(compiled | {"source_url": url}).kernels == f"compiled_{kernels}"
    assert case_of(compiled | {"framework": "torchtitan 2025-04"}).kernels == "compiled_complex"
    for date, until in (("202412", "_2025"), ("2026-01", "_2025"), ("2026-02", "")):
        dated = case_of(LLAMA | {"source_url": f"h100_{date}_titan.md", "cp": "2", "dp": "2"})
        assert (dated.stack.name, dated.plan.cp_kind) == (f"torchtitan{until}", "torch_allgather")
        heads = {
            shape_of(v)[1] for op in all_ops(dated.joint()) if op.op_type == "Attention" for v in op.inputs
        }
        assert (len(heads) == 1) == dated.stack.repeated_keys
    assert case_of(LLAMA | {"framework": "OLMo"}).assumed == ("the stack torchtitan for olmo",)


def test_a_row_divides_the_sequence_where_it_divides_tensors():
    assert [case_of(GPT | {"sp": "yes", "tp": tp}).plan.sp for tp in ("1", "2")] == ["off", "on"]


def test_a_row_of_more_ranks_of_experts_than_of_the_data_has_whole_ones_on_the_ranks_of_tp():
    row = GPT | {"arch": "mixtral", "moe_experts": "8", "moe_topk": "2", "pp": "1", "tp": "2", "sp": "yes"}
    case = case_of(row | {"dp": "2", "ep": "4"})
    assert (case.plan.ep, case.plan.etp) == (4, 1) and "etp 1" in case.assumed
    assert case.sizes.experts.groups == 2  # each rank routes the tokens that it has
    assert [case_of(row | {"dp": "2", "ep": "2", "etp": etp}).plan.etp for etp in ("", "1")] == [0, 1]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_row_that_divides_state_or_gradients(stage):
    """In the types of the stack: those of torch's FSDP are for rows that divide parameters."""
    case = case_of(GPT | {"zero": str(stage), "dp": "2", "tp": "2", "sp": "yes", "precision": "bf16"})
    assert (case.plan.zero, case.plan.sp, case.precision.name) == (stage, "on", "mixed")


@pytest.mark.parametrize("column", ["source", "id", "peak_mem_gb", "iter_time_s", "mfu_pct"])
def test_who_measured_and_what_does_not_matter(column):
    assert case_of(GPT | {column: "another"}) == case_of(GPT)


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"zero": "4"}, "zero=4 is out of range"),
        ({"schedule": "of my own"}, "the schedule 'of my own'"),
        ({"schedule": "none"}, "the schedule 'none' of pp=4"),
        ({"schedule": "interleaved 1F1B"}, "column vpp"),
        ({"schedule": "1f1b", "overlap": "1f1b a2a overlap"}, "the other pass with 1f1b and 1 stages"),
        ({"arch": "deepseek_v2"}, "sizes of a deepseek"),
        ({"arch": "bert"}, "sizes of a bert"),
        ({"moe_experts": "8"}, "sizes of a gpt"),
        ({"arch": "llama", "moe_experts": "8"}, "column moe_topk"),
        ({"hw_gpu": "TPU"}, "a preset for 'TPU'"),
        ({"framework": "pencil"}, "a stack for 'pencil'"),
        ({"hidden": ""}, "a number in column hidden"),
        ({"hidden": "1e999"}, "a number in column hidden"),
        ({"hidden": "-64"}, "a number in column hidden"),
        ({"heads": "0"}, "a model that can be built"),
        ({"n_layers": "7"}, "7 layers do not divide"),
        ({"recompute": "some"}, "recompute 'some'"),
        ({"attention": "wishful"}, "attention 'wishful'"),
        ({"precision": "fp4"}, "precision 'fp4'"),
        ({"precision": "decimal"}, "precision 'decimal'"),
        ({"n_gpus": "6"}, "are 4, and n_gpus=6"),
        ({"tp": "0"}, "degrees of at least 1"),
        ({"dp": "0"}, "whole microbatches"),
        ({"global_batch": "17"}, "global_batch=17 is no multiple of dp=1 times micro_batch=2"),
        ({"sp": "perhaps", "tp": "2"}, "sp 'perhaps'"),
    ],
    ids=str,
)
def test_what_cannot_be_expressed_is_named(changed, missing):
    with pytest.raises(MissingFeatureError, match=missing):
        case_of(GPT | changed)


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        ({"schedule": "1F1B (as in Megatron)"}, "schedule", "1f1b"),
        ({"schedule": "PipeDream\u2013Flush, no more"}, "schedule", "1f1b"),
        ({"schedule": "Zero_Bubble ZB-H1"}, "schedule", "zb_h1"),
        ({"schedule": "ZB-2p"}, "schedule", "zb_auto:2"),
        ({"schedule": "GPipe"}, "schedule", "gpipe"),
        ({"schedule": "DualPipeV", "n_layers": "8"}, "chunks", 2),
        ({"schedule": "1f1b", "vpp": "2", "n_layers": "8"}, "schedule", "interleaved"),
        ({"vpp": "2", "n_layers": "8", "overlap": "1f1b all-to-all overlap"}, "schedule", "combined_1f1b"),
        *(
            ({"vpp": "2", "n_layers": "8", "overlap": text}, "schedule", "interleaved")
            for text in (
                "DeepEP, no 1f1b a2a overlap",
                "without 1f1b a2a overlap",
                "1f1b all-to-all overlap off",
                "--overlap-moe-expert-parallel-comm=false",
            )
        ),
        (
            {"pp": "1", "n_layers": "8", "overlap": "overlap_moe_expert_parallel_comm"},
            "schedule",
            "combined_1f1b",
        ),
        ({"recompute": "Full (uniform, 1 layer)"}, "remat", "full"),
        ({"recompute": "full(block, 3 layers)"}, "remat", "block:3"),
        ({"recompute": "uniform, 2 layers"}, "remat", "uniform:2"),
        ({"recompute": "ratio 0.5", "n_layers": "8"}, "remat", "block:1"),
        ({"recompute": "selective (attention core)"}, "remat", "attention"),
        ({"recompute": "Selective"}, "remat", "attention"),
        ({"recompute": ""}, "remat", "full"),
        ({"recompute": "every 2nd layer"}, "remat", "every:2"),
        ({"recompute": "yes"}, "remat", "full"),
        ({"recompute": "selective (per-op SAC)"}, "remat", "ops:MatMul/2+Attention"),
        (
            {"recompute": "selective (per-op SAC)", "precision": "fp8"},
            "remat",
            "ops:Float8MatMul/2+MatMul/2+Attention",
        ),
        ({"global_batch": "", "n_microbatches": "4"}, "microbatches", 4),
        ({"dp": "", "n_gpus": "4"}, "dp", 1),
        ({"global_batch": "1,024"}, "microbatches", 512),
    ],
    ids=str,
)
def test_spellings(changed, field, value):
    assert getattr(case_of(GPT | changed).plan, field) == value


@pytest.mark.parametrize(
    ("text", "zero", "reshard"),
    [
        ("FULL_SHARD", 3, "auto"),
        ("SHARD_GRAD_OP", 3, "never"),
        ("NO_SHARD", 0, "always"),
        ("fsdp2 per-block", 3, "auto"),
    ],
)
def test_strategies_of_fsdp(text, zero, reshard):
    plan = case_of(LLAMA | {"zero": "", "fsdp": text}).plan
    assert (plan.zero, plan.reshard) == (zero, reshard)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"cp": "2", "attention": "flash", "notes": "CP uses a2a"}, "cp"),
        ({"ep": "2", "dp": "2", "moe_experts": "8", "moe_topk": "2", "arch": "mixtral"}, "ep"),
        ({"zero": "3", "dp": "4", "fsdp": "HYBRID_SHARD", "gpus_per_node": "2"}, "zero_ranks"),
        ({"zero": "1", "dp": "4", "notes": "ZeRO-1 over 2 ranks; more"}, "zero_ranks"),
    ],
    ids=str,
)
def test_what_a_plan_does_not_have_is_the_missing_feature(changed, field):
    """By the fields of a plan, not by a list: it goes away when the field comes."""
    if field in FIELDS:
        assert getattr(case_of(GPT | changed).plan, field) == 2
        return
    with pytest.raises(MissingFeatureError, match=f"{field} > 1"):
        case_of(GPT | changed)


def test_when_gradients_travel_is_left_out_with_a_word():
    row = GPT | {"dp": "2", "overlap": "DP all-reduce NOT overlapped/bucketed (config)"}
    case = case_of(row)
    if "overlap_grads" in FIELDS:
        assert getattr(case.plan, "overlap_grads") == "off"  # noqa: B009
    else:
        assert case.left_out == ("overlap_grads=off",)
    assert case_of(row | {"dp": "1"}).left_out == ()  # nothing travels
    assert case_of(row | {"overlap": "grad all-reduce (not stated)"}).left_out == ()


@pytest.mark.parametrize(
    ("framework", "text", "overlap"),
    [
        ("torchtitan", "", "off"),
        ("torchtitan", "AsyncTP", "split"),
        ("torchtitan", "none (vanilla TP)", "off"),
        ("nanotron", "", "on"),
        ("Megatron-LM", "", "off"),
        ("Megatron-LM", "TP bwd all-reduce overlapped with wgrad", "on"),
    ],
)
def test_what_tensor_parallel_ranks_overlap(framework, text, overlap):
    row = GPT | {"framework": framework, "overlap": text, "tp": "2", "attention": "flash"}
    row |= {"sp": "yes"} if overlap == "split" else {}  # which needs it
    case = case_of(row | ({"attention": ""} if "Megatron" in framework else {}))
    assert (case.plan.tp_overlap, case.left_out) == (overlap, ())
    assert case_of(row | {"tp": "1"}).plan.tp_overlap == "on"


def test_a_limit_of_power_and_a_fused_loss_are_read():
    row = GPT | {"hw_gpu": "H100-SXM 96GB HBM2e (2.4TB/s), 500W cap", "intra_link": ""}
    case = case_of(row)
    assert "device.power_limit=500W" in case.cluster.settings
    plainly = case_of(row | {"hw_gpu": "H100-SXM 96GB HBM2e"}).topology().devices[0]
    limited = case.topology().devices[0]
    assert limited.flops_efficiency == pytest.approx(plainly.flops_efficiency * speed_under_limit(700, 500))
    assert case_of(GPT | {"overlap": "off; fused cross-entropy"}).kernels == "fused_loss_waiting"  # of 2021


def test_nodes_that_aws_joins_have_the_links_of_its_adapters():
    row = GPT | {"hw_gpu": "H100-SXM5-80GB", "intra_link": "", "intra_bw_GBps_unidir": ""}
    links = (("H100-SXM5-80GB", "EFA (p5, assumed)"), ("B200", "EFAv4"), ("A100-SXM4-80GB", "EFA p4de"))
    for gpu, text in links:
        case = case_of(row | {"hw_gpu": gpu, "inter_link": text})
        assert case.topology().levels[-1].link.latency == pytest.approx(203e-6)
        assert ("the link between nodes" in case.assumed) == ("assumed" in text)
    assert case_of(row | {"inter_link": "InfiniBand"}).topology().levels[-1].link.latency < 20e-6


def test_a_model_with_experts_takes_its_numbers_from_the_columns():
    mixtral = GPT | {"arch": "mixtral", "moe_experts": "8", "moe_topk": "2"}
    experts = case_of(mixtral).sizes.experts
    assert (experts.experts, experts.top_k, experts.ffn) == (8, 2, 256)
    assert case_of(mixtral | {"arch": "Llama MoE"}).sizes.experts == experts
    named = {
        **{"arch": "deepseek_v2 MLA MoE (160e top6, 1 dense)", "model": "deepseekv2 truncated to 4 layers"},
        **{"hidden": "5120", "heads": "128", "kv_heads": "128", "ffn": "12288", "moe_experts": "160"},
        **{"moe_topk": "6", "n_layers": "4", "vocab": "102400"},
    }
    sizes = case_of(GPT | named).sizes
    assert (sizes.layers, sizes.experts.ffn, sizes.experts.shared, sizes.expert_layers.dense) == (
        4,
        1536,
        2,
        1,
    )


def test_parameters_that_a_row_says_otherwise_are_noted():
    sizes = case_of(GPT | {"params_b": "0.0067"})  # 50304 x 64 twice, positions, and 6 layers of 50k
    assert not any("parameters" in each for each in sizes.assumed)
    assert "not 7" in case_of(GPT | {"params_b": "7"}).assumed[-1]


def test_cells():
    row = {"a": " 8? ", "b": "Zero_Bubble  ZB\u20131p", "c": "n/a"}
    assert [cell(row, name) for name in "acd"] == ["8", "", ""] and plain(row, "b") == "zero-bubble zb-1p"
    assert number(row, "a") == 8 and number(row, "c", 3) == 3
    cells = {"1.5e-1": 0.15, ".067": 0.067, "2.": 2.0, "": None, "0": None}
    assert {text: decimal({"a": text}, "a") for text in cells} == cells
    for text in (".", "e1", "-1", "1.2.3"):
        with pytest.raises(MissingFeatureError, match="a number in column a"):
            decimal({"a": text}, "a")


def test_the_cluster_is_large_enough_for_the_plan():
    assert len(case_of(GPT).topology().devices) == 8
    assert len(case_of(GPT | {"dp": "3", "global_batch": "12"}).topology().devices) == 16


@pytest.mark.parametrize(
    ("changed", "cluster"),
    [
        ({"hw_gpu": "A100-SXM4-40GB (DGX-A100)"}, "dgx-a100-40gb:1"),
        ({"hw_gpu": "NVIDIA A100", "gpu_mem_gb": "40"}, "dgx-a100-40gb:1"),
        ({"hw_gpu": "V100-SXM3-32GB (DGX-2)", "gpus_per_node": "16"}, "dgx-2:1"),
        ({"hw_gpu": "V100", "intra_link": "NVLink2 hybrid cube mesh"}, "dgx-1:1"),
        ({"hw_gpu": "V100", "gpus_per_node": "8"}, "dgx-1:1"),
        ({"hw_gpu": "H100 96GB HBM2e"}, "hgx-h100-96gb:1"),
        ({"hw_gpu": "H800-SXM"}, "dgx-h100:1 nvlink.bandwidth=200GB/s"),
        ({"hw_gpu": "H200", "gpu_mem_gb": "141"}, "dgx-h200:1"),
        (
            {"hw_gpu": "RTX 3090", "gpus_per_node": "8"},
            "rtx-3090:1 devices_per_node=8 ethernet.devices_per_port=8",
        ),
        ({"hw_gpu": "AMD Instinct MI250X"}, "mi250x:1"),
        ({"hw_gpu": "GB200", "gpus_per_node": "4"}, "gb200-nvl72:1 devices_per_node=4 nvlink.group_size=72"),
        ({"hw_gpu": "GB300", "gpus_per_node": "72", "gpu_mem_gb": "288"}, "gb300-nvl72:1"),
        ({"inter_bw_gbps_per_node": "1600"}, "dgx-a100:1"),
        ({"inter_bw_gbps_per_node": "100"}, "dgx-a100:1 infiniband.bandwidth=1562500000B/s"),
        (
            {"inter_link": "InfiniBand HDR 4x200Gb/s per node", "inter_bw_gbps_per_node": "800"},
            "dgx-a100:1 infiniband.devices_per_port=2",
        ),
        (
            {"inter_link": "1 x 100 Gb/s RoCE"},
            "dgx-a100:1 infiniband.devices_per_port=8 infiniband.bandwidth=12500000000B/s",
        ),
        ({"intra_bw_gbps_unidir": "200"}, "dgx-a100:1 nvlink.bandwidth=200000000000B/s"),
    ],
    ids=str,
)
def test_clusters_of_rows(changed, cluster):
    case = case_of(GPT | changed)
    assert str(case.cluster) == cluster
    assert len(case.topology().devices) >= case.plan.devices


def test_a_gpu_of_an_unknown_name_is_assumed_aloud():
    assert "H100X is a GPU as in dgx-h100" in case_of(GPT | {"hw_gpu": "H100X"}).assumed
    assert not [text for text in case_of(GPT | {"hw_gpu": "H100-SXM5-80GB"}).assumed if "GPU as in" in text]


CELLS = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "1e99", "yes", "full (block, 0 layers)", "every 0", "ratio 0.1", "zb-v"]
    ),
    st.sampled_from(
        ["0x200Gb/s", "hsdp 0", "final-stage layers=0", "mla", "mixtral", "(((", "n/a", "interleaved"]
    ),
    st.text(max_size=12),
)


@given(st.dictionaries(st.sampled_from(sorted(GPT)), CELLS, min_size=1, max_size=4))
def test_odd_cells_are_understood_or_missing(changed):
    row = GPT | changed
    try:
        case = case_of(row)
    except MissingFeatureError as error:
        assert str(error) and len(str(error)) < 400
    else:
        assert case.plan.devices <= len(case.topology().devices)


def test_a_model_that_is_named_needs_no_sizes():
    row = {
        **{"model": "gpt2", "framework": "pytorch", "hw_gpu": "A100", "n_gpus": "8", "seq": "1024"},
        **{"dp": "8", "micro_batch": "8", "global_batch": "64", "precision": "bf16"},
    }
    sizes = case_of(row).sizes
    assert (sizes.layers, sizes.hidden, sizes.vocab) == (12, 768, 50257)
    with pytest.raises(MissingFeatureError, match="in column n_layers, or a model by name: 'gpt2-of-ours'"):
        case_of({**row, "model": "gpt2-of-ours"})
    with pytest.raises(MissingFeatureError, match="tp=2 pp=1 cp=1 are 2, which does not divide n_gpus=7"):
        case_of({**row, "dp": "", "tp": "2", "n_gpus": "7"})


NVIDIA = {
    **{"model": "Qwen3", "arch": "llama MoE (qwen3)", "framework": "Megatron-Core / TE", "hw_gpu": "H100"},
    **{"n_gpus": "32", "seq": "4096", "n_layers": "4", "hidden": "512", "heads": "8", "kv_heads": "4"},
    **{"ffn": "256", "vocab": "1000", "moe_experts": "8", "moe_topk": "2", "dp": "16", "tp": "2"},
    **{"sp": "yes", "ep": "4", "zero": "1", "micro_batch": "1", "global_batch": "64", "attention": "flash"},
    **{"precision": "bf16", "recompute": "selective (layernorm, moe_act)"},
    "overlap": "bf16 grad reduce-scatter overlapped; TP comm overlap (TE userbuffers); DeepEP dispatcher",
}


def test_columns_of_overlap_and_recomputation_are_read():
    case = case_of(NVIDIA)
    assert case.plan.tp_overlap == "split" and case.plan.overlap_grads == "on"
    assert case.plan.remat == "parts:norms+activations"
    assert case.sizes.experts.dispatcher == "deepep"
    assert case.precision.gradient_sum.name == "bfloat16"
    others = {"overlap": "grad-reduce off; TP wgrad overlapped; no DeepEP", "recompute": "none"}
    plain = case_of({**NVIDIA, **others})
    assert (plain.plan.tp_overlap, plain.plan.remat) == ("on", "none")
    assert plain.sizes.experts.dispatcher != "deepep" and plain.precision.gradient_sum.name == "float32"


def test_modules_that_are_recomputed_are_all_known_or_refused():
    found = case_of({**NVIDIA, "recompute": "selective (RMSNorm and MLA up-projection)"}).plan.remat
    assert found == "parts:norms+up_projections"
    with pytest.raises(MissingFeatureError, match="recompute 'shared-experts' beside norms"):
        case_of({**NVIDIA, "recompute": "selective (layernorm, shared_experts)"})
