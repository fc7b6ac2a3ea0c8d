"""The software of a row of measurements: its stack, kernels, attention and types, by its columns."""

import pytest
from truth_rows import GPT, LLAMA

import distsim
from distsim.ir import BFloat16, Float32
from distsim.transforms.kernels import KERNELS
from distsim.transforms.kernels.policies import kernels_named
from distsim.truth import MissingFeatureError, case_of, predict
from distsim.truth.machine import OLD_LIBRARIES, Cluster
from distsim.truth.software import LOSS_FUSED


@pytest.mark.parametrize(
    ("column", "text", "kernels"),
    [
        *[("framework", f"Megatron-LM {month}", "fused_2021") for month in ("2020-09", "2021-09")],
        *[("framework", f"Megatron-LM {month}", "fused_2022") for month in ("2021-10", "2022-08")],
        ("framework", "Megatron-LM 2022-09", "fused_waiting"),
        *[("source_url", f"arXiv:{n}.04473", f"fused_{k}") for n, k in ((2104, "2021"), (2205, "2022"))],
    ],
)
def test_megatron_is_as_old_as_a_column_says_or_its_paper_is(column, text, kernels):
    assert case_of(GPT | {column: text}).kernels == kernels


def test_losses_are_fused_in_policies_that_there_are():
    assert {*LOSS_FUSED, *LOSS_FUSED.values()} <= {*KERNELS}
    for framework, zero, kernels in (
        ("Megatron-DeepSpeed", "", "fused_loss_waiting"),
        ("Megatron-DeepSpeed 2023-12", "", "fused_loss"),
        ("Megatron-LM 2024-03", "", "fused_loss"),
    ):
        row = GPT | {"framework": framework, "zero": zero, "overlap": "fused cross-entropy"}
        row |= {"precision": "bf16", "attention": "flash"} if "20" in framework else {}
        assert case_of(row).kernels == kernels


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        *((name, "fsdp") for name in ("FairScale", "axolotl 0.8", "TRL", "PyTorch Lightning", "fms-fsdp")),
        *((name, "torchtitan") for name in ("verl (FSDP)", "OLMo-core")),
    ],
)
def test_trainers_around_torch_are_taken_for_its_fsdp(name, stack):
    case = case_of(LLAMA | {"framework": name})
    assert case.stack.name == stack
    assert stack in name or any(f"the stack {stack} for" in each for each in case.assumed)


@pytest.mark.parametrize(
    ("zero", "stack", "kernels"),
    [
        ("", "megatron_2021", "fused_2021_epilogues"),
        ("0", "deepspeed", "fused_deepspeed"),
        ("3", "deepspeed_2021", "fused_2021"),
    ],
)
def test_deepspeed_runs_a_step_of_megatron_where_zero_is_named(zero, stack, kernels):
    pipeline = {"pp": "1", "dp": "4"} if zero == "3" else {}
    case = case_of(GPT | {"framework": "Megatron-DeepSpeed", "zero": zero, **pipeline})
    assert (case.stack.name, case.kernels) == (stack, kernels)
    assert any("own loop" in each for each in case.assumed) == (not zero)


@pytest.mark.parametrize(
    ("zero", "pp", "precision", "name"),
    [
        *[(zero, "2", "bf16", "deepspeed_pipeline") for zero in ("0", "1")],
        ("0", "1", "bf16", "deepspeed_bf16"),
        *[("1", "1", "bf16", "deepspeed"), ("1", "2", "fp16", "deepspeed"), ("2", "2", "bf16", "deepspeed")],
        ("0", "1", "fp16", "deepspeed"),
    ],
)
def test_deepspeed_in_bfloat16_without_zero_or_with_pipelines_sums_in_float32_and_divides_state(
    zero, pp, precision, name
):
    """BF16_Optimizer is of stage 1, whatever is named; its buffers are summed whole, at the end."""
    row = GPT | {"framework": "Megatron-DeepSpeed 2022-07", "zero": zero, "precision": precision}
    row |= {"pp": pp, "dp": "8", "tp": "1", "n_gpus": str(8 * int(pp))}
    case = case_of(row)
    assert case.stack.name == name
    assert (case.precision.gradient_sum == Float32()) == (name != "deepspeed")
    if name != "deepspeed":
        assert (case.plan.zero, case.plan.bucket, case.plan.overlap_grads) == (1, "nanotron", "off")


@pytest.mark.parametrize("pp", ["1", "2"])
def test_aleph_alphas_code_sums_gradients_as_they_are_with_a_pipeline_too(pp):
    """2 bytes a parameter of them, where DeepSpeed's pipelines hold 4 all step: its optimizer is its own."""
    row = GPT | {"zero": "1", "precision": "bf16", "pp": pp, "dp": "8", "n_gpus": str(8 * int(pp))}
    own = case_of(row | {"framework": "AA-Scaling (Aleph Alpha)"})
    theirs = case_of(row | {"framework": "Megatron-DeepSpeed 2023-01"})
    assert own.precision.gradient_sum == BFloat16()
    assert theirs.precision.gradient_sum == (Float32() if pp == "2" else BFloat16())
    assert (own.plan.zero, own.plan.bucket, own.plan.tp_overlap) == (1, "nanotron", "on")
    assert (
        case_of(row | {"framework": "AA-Scaling (Aleph Alpha)", "tp": "2", "dp": "4"}).plan.tp_overlap
        == "off"
    )


@pytest.mark.parametrize(
    ("notes", "graphs"),
    [
        ("CUDA graphs off; mock data", ""),
        ("no CUDA graphs in the v0.2.0 config", ""),
        ("CUDA graphs on (NeMo v2.3.0 config of this model)?", "layers"),
        ("CUDA graphs on for this layout in v2.3.0 configs (25.02 itself not stated)", "layers"),
        ("enable_cuda_graph=true", "layers"),
        ("cuda graphs=false", ""),
        ("CUDA graphs are not used", ""),
        ("averaging window not stated; CUDA graph of a full iteration", "step"),
    ],
)
def test_graphs_of_rows(notes, graphs):
    row = GPT | {"framework": "Megatron Bridge (NeMo container 25.11)", "notes": notes}
    assert kernels_named(case_of(row).kernels).graphs == graphs


@pytest.mark.parametrize(
    ("framework", "weighted"),
    [
        ("NeMo 2.0 (container 25.02) Megatron-core / TE", "tokens"),
        ("NeMo 2.0 (container 25.04.00) / TE", "experts"),
        ("Megatron-LM 2025-03", "tokens"),
        ("Megatron-Core MoE", "experts"),
        ("DeepSpeed", "tokens"),
    ],
)
def test_rows_of_experts_are_weighed_where_the_software_of_their_time_does(framework, weighted):
    mixtral = GPT | {"arch": "mixtral", "moe_experts": "8", "moe_topk": "2", "precision": "bf16", "pp": "1"}
    sizes = case_of(mixtral | {"framework": framework}).sizes
    assert sizes.experts is not None and sizes.experts.weighted == weighted


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("no flash (not stated)", "math"),
        ("FlashAttention-2", "flash2"),
        ("flash-attn v1", "flash1"),
        ("fa3", "flash3"),
        ("SDPA flash", "flash2"),
        ("unfused softmax (fused scale-mask-softmax), no flash", "math"),
        ("cuDNN", "cudnn"),
        ("w/o flash", "math"),
    ],
)
def test_kinds_of_attention(text, kind):
    assert case_of(GPT | {"attention": text}).attention == kind


def test_a_kernel_of_attention_that_no_column_names_is_the_stacks():
    row = GPT | {"attention": "flash (v1/v2 not stated)"}
    for framework, kernel in (("Composer", "triton"), ("nanotron", "flash2"), ("PyTorch", "flash")):
        case = case_of(row | {"framework": framework})
        assert case.attention == kernel and f"attention {kernel}" in case.assumed


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"precision": "bf16, fp32 grad accumulation"}, "mixed"),
        ({"precision": "BF16"}, "mixed"),
        ({"precision": "bf16 pure"}, "bf16"),
        ({"precision": "pure bfloat16"}, "bf16"),
        ({"precision": "fp16/bf16"}, "mixed_fp16"),
        ({"precision": "bf16/fp16"}, "mixed"),
        ({"precision": "float32"}, "fp32"),
        ({"precision": "TF32"}, "tf32"),
        ({"precision": "mxfp8"}, "mixed_fp8"),
        ({"precision": "fp16", "framework": "DeepSpeed", "zero": "3", "dp": "2", "pp": "1"}, "mixed_fp16"),
        ({"precision": "bf16", "framework": "Composer", "zero": "3", "fsdp": "PURE"}, "fsdp2_pure"),
        ({"precision": "bf16", "framework": "FSDP", "zero": "3", "fsdp": "PURE", "pp": "1"}, "fsdp"),
        ({"precision": "bf16", "framework": "TRL", "zero": "3", "pp": "1"}, "fsdp"),
        ({"precision": "bf16", "framework": "TRL", "zero": "1", "pp": "1"}, "fsdp"),
        ({"precision": "fp16", "framework": "TRL", "zero": "3", "pp": "1"}, "fsdp_fp16"),
        ({"precision": "bf16", "framework": "TRL", "zero": "3", "fsdp": "yes, fp32 reduction"}, "fsdp2"),
        ({"precision": "bf16", "framework": "torchtitan", "zero": "3", "pp": "1"}, "fsdp2"),
    ],
    ids=str,
)  # fmt: skip
def test_types(changed, name):
    assert case_of(GPT | changed).precision.name == name


def test_states_of_16_bits_without_a_master_copy_are_four_bytes_a_parameter():
    row = GPT | {"precision": "fp8 (linears); bf16 optimizer states without master copy"}
    precision = case_of(row).precision
    assert (precision.states, precision.master) == ((BFloat16(),), None)
    usual = case_of(GPT | {"precision": "fp8 (linears; attention and states in bf16)"}).precision
    assert (usual.states, usual.master) == ((Float32(),), Float32())


def test_flash_attentions_own_code_has_softmax_in_the_type_of_its_operands():
    """SelfAttention names the type, which autocast then leaves as it is: 2 bytes a pair are saved, not 6."""
    row = GPT | {"precision": "bf16 autocast", "attention": "no flash"}
    own = case_of(row | {"framework": "flash-attention training"}).precision
    other = case_of(row | {"framework": "PyTorch"}).precision
    assert set(other.wide_ops) - set(own.wide_ops) == {"Softmax"}
    assert (own.compute, own.states) == (other.compute, other.states)


@pytest.mark.parametrize(
    ("changed", "scaling"),
    [
        ({"precision": "fp8 linears", "framework": "torchtitan", "zero": "3", "pp": "1"}, "tensorwise"),
        ({"precision": "fp8 rowwise", "framework": "torchtitan", "zero": "3", "pp": "1"}, "rowwise"),
        ({"precision": "fp8"}, "delayed"),
        ({"precision": "fp8 (current scaling)"}, "tensorwise"),
        ({"precision": "mxfp8"}, "blockwise"),
    ],
    ids=str,
)
def test_scalings(changed, scaling):
    assert case_of(GPT | changed).precision.scaling == scaling


@pytest.mark.parametrize(
    ("framework", "stack", "kernels"),
    [
        ("flash-attention training (Lightning, DDP)", "torch", "flash_attention"),
        ("llm.c (CUDA C)", "megatron", "fused_logits"),
        ("AA-Scaling (Aleph Alpha)", "scaling", "eager"),
        ("SageMaker Model Parallel (MiCS)", "deepspeed", None),
    ],
)
def test_frameworks_by_their_columns(framework, stack, kernels):
    case = case_of({**GPT, "framework": framework, "attention": "flash-attn 2", "precision": "bf16"})
    assert case.stack.name.startswith(stack) and kernels in (case.kernels, None)


@pytest.mark.parametrize(
    ("framework", "gpu", "old"),
    [
        ("Composer/PyTorch FSDP1 (torch 2.1)", "H100-SXM5-80GB", True),
        ("nanotron", "H100-SXM5-80GB", True),
        ("Composer/PyTorch FSDP1 (torch 2.1)", "A100-SXM4-80GB", False),
        ("PyTorch 2.5 compile + DDP", "H100-SXM5-80GB", False),
        ("NeMo 2.0 (container 25.02)", "H100-SXM5-80GB", False),
    ],
)
def test_products_on_hopper_are_of_the_libraries_of_their_time(framework, gpu, old):
    row = {**LLAMA, "framework": framework, "hw_gpu": gpu, "precision": "bf16", "fsdp": "", "zero": "1"}
    cluster = case_of(row).cluster
    clusters = (cluster, Cluster(cluster.name, ()))
    own, usual = (dict(each.topology().devices[0].rates.shares)["linear"] for each in clusters)
    assert cluster.old_libraries == old
    assert own / usual == pytest.approx(OLD_LIBRARIES if old else 1.0, rel=5e-3)


@pytest.mark.parametrize(
    ("framework", "stack", "fields"),
    [
        ("torchtitan", "torchtitan", {"zero": 3, "reshard": "auto", "bucket": "fsdp2"}),
        ("PyTorch FSDP", "fsdp", {"zero": 3}),
        ("Composer", "composer", {"zero": 3}),
        ("Megatron-LM", "megatron", {"zero": 0, "bucket": "megatron"}),
        ("PyTorch", "torch", {"zero": 0}),
    ],
)
def test_what_no_column_says_to_be_divided_is_as_the_stack_has_it(framework, stack, fields):
    open_row = LLAMA | {"framework": framework, "zero": "", "fsdp": "", "precision": "bf16"}
    case = case_of(open_row)
    assert case.stack.name == stack and {name: getattr(case.plan, name) for name in fields} == fields
    assert case.precision == case_of(open_row | {"zero": str(fields["zero"])}).precision
    said = "zero=3, parameters divided over all ranks" in case.assumed
    assert said == (fields["zero"] == 3) and case_of(open_row | {"zero": "0"}).plan.zero == 0
    assert case_of(open_row | {"dp": "1", "n_gpus": "1", "global_batch": "2"}).plan.zero == 0


def test_plain_pytorch_is_the_stack_of_simulate():
    """Predicted seconds of ``validate`` are those that its ratios correct, by ``--own-runs``."""
    row = {"framework": "PyTorch", "model": "gpt2", "hw_gpu": "A100", "seq": "1024", "dp": "8"}
    row |= {"global_batch": "64", "micro_batch": "8"}
    case = case_of(row)
    assert (case.attention, case.precision.name, case.kernels) == ("flash", "amp", "eager")
    found = distsim.simulate("gpt2", "dgx-a100", "dp=8", batch=64, seq=1024)
    assert predict(case).seconds == pytest.approx(found.step_period, rel=1e-9)
    assert case_of(row | {"source_url": "arxiv:2104.04473"}).attention == "math", "before torch 2.0"


@pytest.mark.parametrize(
    ("text", "remat"),
    [
        ("partial: MaxText save_qkv_proj", "names:qkv_proj"),
        ("save_out_proj", "names:out_proj"),
        (
            "XLA remat policy save_dot_except_mlpwi (the gate and up recomputed)",
            "names:qkv_proj+out_proj+mlpwo",
        ),
        ("save_dot_except_mlp", "names:qkv_proj+out_proj"),
        ("save_dot_with_context_except_mlp", "names:qkv_proj+context+out_proj"),
        ("Praxis SAVE_QKV_OUT_PROJ", "names:qkv_proj+out_proj"),
        ("save_encoded_and_out_proj", "names:context+out_proj"),
        ("save_dot_only", "ops:MatMul+Gemm"),
        ("minimal_with_context", "ops:MatMul+Gemm+Attention"),
    ],
)
def test_policies_of_jax_save_values_by_name(text, remat):
    assert (
        case_of({**LLAMA, "precision": "bf16", "framework": "MaxText", "recompute": text}).plan.remat == remat
    )


@pytest.mark.parametrize("text", ["save_dot_with_context_except_mlpwi", "save_out_proj_offloaded"])
def test_policies_that_save_otherwise_are_missing(text):
    with pytest.raises(MissingFeatureError, match=text.replace("_", "-")):
        case_of({**LLAMA, "precision": "bf16", "framework": "MaxText", "recompute": text})


def test_branches_are_parallel_where_a_column_says_so_of_them():
    rows = [GPT | {"arch": arch, "model": ""} for arch in ("gpt (parallel attention+MLP, rotary)", "gpt")]
    assert [case_of(row).sizes.branches for row in rows] == ["parallel", "sequential"]
    assert case_of(GPT | {"arch": "gpt (tensor-parallel attention)"}).sizes.branches == "sequential"
