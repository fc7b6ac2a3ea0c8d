"""Files of frameworks: what is read of them, what is refused, and that nothing in them runs."""

import json
from pathlib import Path

import pytest
from cli_cases import run
from hypothesis import given
from hypothesis import strategies as st
from said import says

from distsim.cli import main
from distsim.errors import DistsimError, ImportModelError, ModelLimitError
from distsim.importer.configs import BatchSizes, read_deepspeed, read_megatron_args, read_torchtitan
from distsim.importer.configs.arguments import read_indented
from distsim.importer.configs.arithmetic import flags_of, integer_of
from distsim.importer.configs.megatron_layout import stage_layers
from distsim.importer.configs.shell import Script
from distsim.models.decoder import count_parameters
from distsim.plan import Plan
from distsim.transforms.autodiff.precision import precision_named

DATA = Path(__file__).parent / "data" / "training"

LLAMA = """#!/bin/bash
# Llama 3 8B --num-layers 1 (a comment)
GPUS=8; NODES=${SLURM_NNODES:-2}
WORLD=$((GPUS * $NODES))
TP=${2:-"2"}  # the second argument, which nobody gives
FP8=false
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope
    "--tokenizer-type HuggingFaceTokenizer" --tokenizer-model meta-llama/Meta-Llama-3-8B # the vocabulary
)
MORE=" --seq-length 4096 \\
    --micro-batch-size 1 --global-batch-size $((WORLD * 4))"
if [[ "$FP8" == "true" ]]; then MORE="$MORE --fp8-format hybrid"
elif [ $NODES -gt 1 ]; then
    MODEL+=(--tensor-model-parallel-size $TP --sequence-parallel)
else
    MODEL+=(--tensor-model-parallel-size 8)
fi
case $NODES in
    1|4) MORE+=" --pipeline-model-parallel-size 4" ;;
    *) MORE+=" --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8" ;;
esac
torchrun --nproc_per_node $GPUS --nnodes=$NODES pretrain_gpt.py ${MODEL[@]} $MORE --bf16 \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --hidden-dropout 0 \\
    --attention-dropout 0 --lr 1e-4 --frobnicate 3 --save $1 2>&1 | tee log_${WORLD}.txt
"""


def written(tmp_path: Path, text: str, name: str = "train.sh") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def argued(tmp_path: Path, *more: str):
    """A small decoder by a list of arguments."""
    few = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2"
    return read_megatron_args(written(tmp_path, "\n".join([few, "--vocab-size 128", *more]), "args.txt"))


def plan(config, devices: int, own: str = "") -> Plan:
    return Plan.parse(config.laid_out(devices, own)[0])


def test_a_script_is_followed(tmp_path):
    config = read_megatron_args(written(tmp_path, LLAMA))
    assert count_parameters(config.sizes).params == 8030261248  # params.csv of the reference set
    assert (config.seq, config.devices, config.unknown) == (4096, 16, ("--frobnicate",))
    assert config.batch == BatchSizes(64, 1)
    text, batch = config.laid_out(16)
    assert batch == 64
    assert Plan.parse(text) == Plan.parse(
        "dp=4,tp=2,pp=2,microbatches=16,schedule=interleaved,chunks=2,stages=layers,zero=1,sp=on,"
        "bucket=megatron,overlap_grads=on,overlap_params=on"
    )
    assert config.stack.precision == "mixed"
    assert (config.stack.attention, config.stack.optimizer, config.stack.clip) == ("cudnn", "adamw", 1.0)


@pytest.mark.parametrize(
    ("file", "parameters"),
    [("mixtral_8x7b", 46702792704), ("deepseek_v3_megatron_fsdp", 671026404352), ("gpt3_175b", None)],
)
def test_models_of_megatron_have_the_parameters_that_they_are_known_for(file, parameters):
    found = count_parameters(read_megatron_args(DATA / f"{file}.json").sizes).params
    assert found == parameters if parameters else abs(found / 175e9 - 1) < 0.01


def test_presets_become_the_plans_that_they_are():
    gpt = read_megatron_args(DATA / "gpt3_175b.json")
    assert gpt.laid_out(128)[0] == "dp=1,tp=8,pp=16,microbatches=1536,schedule=1f1b,stages=layers,remat=none"
    deepseek = read_megatron_args(DATA / "deepseek_v3_megatron_fsdp.json")
    assert plan(deepseek, 256) == Plan.parse("dp=256,microbatches=2,ep=8,zero=3,remat=ops:Attention")
    assert deepseek.sizes.expert_layers.dense == 3
    llama = read_torchtitan(DATA / "llama3_405b.toml")
    assert llama.laid_out(128) == (
        "dp=16,tp=8,microbatches=1,sp=dtensor,tp_overlap=split,zero=3,reshard=auto,bucket=fsdp2,remat=full_early",
        32,
    )
    assert (llama.model, llama.stack.kernels) == ("llama3-405b", "compiled_complex")
    policy = precision_named(llama.stack.precision)
    assert (policy.parameter.short, policy.linear.name) == ("f32", "float8e4m3fn")
    assert (policy.scaling, policy.linear_ops) == ("tensorwise", ("MatMul", "Gemm"))
    small = read_torchtitan(DATA / "llama3_8b.toml")
    assert small.laid_out(64)[0].endswith("zero=3,reshard=auto,bucket=fsdp2,remat=ops:MatMul/2+Attention")
    assert small.unknown == ()
    experts = read_torchtitan(DATA / "llama4_17bx128e.toml")
    assert experts.fields["stages"] == "12-13-12-11"
    assert abs(count_parameters(experts.sizes).params / 400e9 - 1) < 0.01  # Llama 4 Maverick: 400 billion
    auto = read_deepspeed(DATA / "zero3_auto.json")
    assert (auto.fields["zero"], auto.stack.precision, auto.model) == (3, "mixed_bf16_grads", None)
    assert auto.laid_out(8, "microbatches=2", 32) == ("dp=8,microbatches=2,zero=3,remat=none", 32)
    assert auto.unknown == ()


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "remat=uniform:2",
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "remat=block:3"),
        ("--recompute-activations", "remat=attention"),
        (
            "--recompute-granularity selective --recompute-modules layernorm core_attn",
            "remat=parts:norms+attention",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "tp=2,microbatches=1,sp=on,tp_overlap=split",
        ),
        ("--context-parallel-size 4 --cp-comm-type a2a", "cp=4,cp_kind=ulysses"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            "usp:2",
        ),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", "stages=3-5"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|t*5L'", "stages=3-5"),
        (
            "--pipeline-model-parallel-size 5 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            "stages=1-2-2-2-1",
        ),
        ("--use-distributed-optimizer --ddp-bucket-size 5000000", "zero=1,bucket=5000000p"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "zero_ranks=2"),
        ("--use-torch-fsdp2", "zero=3,bucket=fsdp2"),
        ("--global-batch-size 16", "microbatches=2"),
        ("--num-experts 8 --expert-model-parallel-size 4", "ep=4"),
        ("--num-experts 8 --overlap-moe-expert-parallel-comm", "schedule=combined_1f1b"),
    ],
)
def test_arguments_are_fields_of_a_plan(tmp_path, more, fields):
    config = argued(tmp_path, more)
    ranks = 4 if "context" not in more and "pipeline" not in more else 1
    whole = ranks
    for axis in ("tp", "pp", "cp"):
        whole *= int(config.fields.get(axis, 1))
    text, _ = config.laid_out(whole)
    assert all(field in text for field in fields.split(",")), text
    Plan.parse(text)
    assert config.unknown == ()


def test_experts_weigh_their_rows(tmp_path):
    """Megatron-LM's of that version, without an argument that says so."""
    experts = argued(tmp_path, "--num-experts 8 --swiglu").sizes.experts
    assert (experts.weighted, experts.dispatcher) == ("experts", "allgather")


@pytest.mark.parametrize(
    ("more", "precision"),
    [
        ("", "fp32"),
        ("--bf16", "mixed"),
        ("--bf16 --grad-reduce-in-bf16", "mixed_bf16_grads"),
        ("--fp16", "mixed_fp16"),
        ("--bf16 --fp8-format hybrid", "fp8"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "fp8:scaling=tensorwise"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "fp8:scaling=blockwise"),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --main-grads-dtype bf16",
            "mixed:states=bfloat16+float32,update=bfloat16,gradient_sum=bfloat16",
        ),
    ],
)
def test_types_are_a_policy(tmp_path, more, precision):
    found = argued(tmp_path, more).stack.precision
    assert found == precision
    precision_named(found)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ("--optimizer muon", ("--optimizer='muon'", "adamw")),
        ("--optimizer-cpu-offload", ("--optimizer-cpu-offload", "host")),
        ("--hybrid-layer-pattern M-M*", ("--hybrid-layer-pattern", "state-space")),
        ("--tensor-model-parallel-size", ("--tensor-model-parallel-size has no value", "variable")),
        ("--tensor-model-parallel-size zwei", ("--tensor-model-parallel-size='zwei'", "whole number")),
        ("--position-embedding-type relative", ("--position-embedding-type", "rope")),
        ("--num-attention-heads 5", ("--num-attention-heads=5", "--hidden-size 64")),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|t*4L'", ("7 layers", "8")),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E;rm'", ("E, t, m, L",)),
        ("--pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm", ("comm", "left out without")),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(tmp_path, more, parts):
    with says(ImportModelError, "args.txt", *parts):
        argued(tmp_path, more)


def test_the_other_programs_are_refused(tmp_path):
    script = written(tmp_path, "python pretrain_bert.py --num-layers 2 --hidden-size 8")
    with says(ImportModelError, "pretrain_bert.py", "decoder"):
        read_megatron_args(script)


def test_yaml_says_the_same_in_three_ways(tmp_path):
    flat = "--num-layers: 8\n--hidden-size: 64\n--num-attention-heads: 4\n--seq-length: 32\n--bf16: true\n"
    own = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n" + "".join(f"  {line}\n" for line in flat.splitlines())
    nemo = (
        "trainer:\n  precision: bf16-mixed\nmodel:\n  num_layers: 8  # of them\n  hidden_size: 64\n"
        "  num_attention_heads: 4\n  encoder_seq_length: 32\n  tensor_model_parallel_size: 1\n"
        "  optim:\n    name: distributed_fused_adam\n    betas:\n    - 0.9\n"
    )
    for text in (flat, own, nemo):
        more = (
            text
            + ("  " if text is not flat else "")
            + ("micro_batch_size: 2" if text is nemo else "--micro-batch-size: 2")
        )
        config = read_megatron_args(written(tmp_path, more, "config.yaml"))
        assert (config.sizes.layers, config.seq, config.batch.micro) == (8, 32, 2)
        assert config.stack.precision == "mixed"
        assert config.fields.get("zero", 0) == (1 if text is nemo else 0)
        assert config.unknown == ()


def test_lists_and_lines_of_yaml():
    assert read_indented("a:\n  - 1\n  - b\nc: [x, 2.5]\nd:\n  e: null\n", "f") == {
        **{"a": [1, "b"], "c": ["x", 2.5], "d": {"e": None}}
    }
    with says(ImportModelError, "f: line 2"):
        read_indented("a: 1\nwhat is this\n", "f")


def test_nothing_is_run(tmp_path):
    trap = tmp_path / "trap"
    text = f"X=$(touch {trap})`touch {trap}`\ntouch {trap}\neval 'touch {trap}'\n"
    config = read_megatron_args(written(tmp_path, text + LLAMA))
    assert config.sizes.layers == 32
    assert not trap.exists()


def test_scripts_that_grow_are_refused(tmp_path):
    text = "A=(x x x x x x x x)\n" + 'A=(${A[@]} "${A[@]}" ${A[@]} ${A[@]})\n' * 20
    with pytest.raises(ModelLimitError, match="characters long"):
        Script.of(text)
    with pytest.raises(ModelLimitError, match="100,000 parts"):
        stage_layers("(((t*9999)*9999)*9999)", "f")
    big = written(tmp_path, "# " + "x" * 2**20)
    with pytest.raises(ModelLimitError):
        read_megatron_args(big)


@given(st.text(alphabet="ab$(){}[]\"'`\\;|&<># \n=+-", max_size=200))
def test_any_text_is_a_script(text):
    commands = Script.of(text).commands
    assert all(isinstance(word, str) for command in commands for word in command)


@given(st.text(max_size=60))
def test_arithmetic_is_numbers_or_nothing(text):
    assert isinstance(integer_of(text, lambda name: ""), int | None)
    assert flags_of(text) is None or set(flags_of(text)) <= {0, 1}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), st.lists, max_leaves=5))
def test_any_value_of_a_field_is_read_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    for table in (
        {"args": {"num-layers": 4, "hidden-size": value, "num-attention-heads": value, "seq-length": 8}},
        {"zero_optimization": {"stage": value, "reduce_bucket_size": value}, "bf16": value},
    ):
        path.write_text(json.dumps(table))
        for read in (read_megatron_args, read_deepspeed):
            try:
                read(path)
            except DistsimError as error:
                assert "any.json" in str(error)


def test_torchtitan_pipelines_and_hybrids(tmp_path):
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 8\nsurprise = 1\n'
        "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4\n"
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
        '[activation_checkpoint]\nmode = "none"\n'
    )
    config = read_torchtitan(written(tmp_path, text, "job.toml"))
    assert plan(config, 16) == Plan.parse(
        "dp=8,pp=2,microbatches=8,schedule=interleaved_torch,chunks=2,stages=8-9-8-7,zero=3,reshard=auto,"
        "zero_ranks=4,bucket=fsdp2"
    )
    assert config.unknown == ("training.surprise",)
    assert config.seq == 2048
    for rotate, kind in (("", "torch_allgather"), ("alltoall", "torch_alltoall")):
        method = f'context_parallel_rotate_method = "{rotate}"\n' if rotate else ""
        divided = text.replace("[activation", f"context_parallel_degree = 2\n{method}[activation")
        assert plan(read_torchtitan(written(tmp_path, divided, "job.toml")), 32).cp_kind == kind
    other = read_torchtitan(written(tmp_path, text.replace("8B", "9B"), "job.toml"))
    assert (other.model, other.sizes) == (None, None)
    assert "9B" in other.lacks
    assert other.fields["stages"] == "default"
    alone = text.replace("shard_degree = 4", "shard_degree = 1")
    single = read_torchtitan(written(tmp_path, alone, "job.toml"))
    assert (plan(single, 4).zero, single.stack.precision) == (0, "amp")
    # A rank's sequences are one microbatch without pipeline ranks, each is one with them.
    flat = read_torchtitan(written(tmp_path, text.replace("pipeline_parallel_degree = 2\n", ""), "job.toml"))
    for own, microbatches in (("pp=1", 1), ("pp=4", 8), ("pp=1,microbatches=2", 2)):
        laid = {each.laid_out(32, own) for each in (flat, config)}
        assert {Plan.parse(text).microbatches for text, _ in laid} == {microbatches}, laid


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, ("offload_optimizer",)),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ("zero_quantized_weights",)),
        ({"zero_optimization": {"stage": 5}}, ("stage=5", "0 to 3")),
        ({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}, ("OneBitAdam",)),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("bf16 and fp16", "enable one")),
        ({"fruit": 1}, ("zero_optimization", "DeepSpeed")),
    ],
)
def test_deepspeed_refuses_what_is_not_simulated(tmp_path, table, parts):
    with says(ImportModelError, "ds.json", *parts):
        read_deepspeed(written(tmp_path, json.dumps(table), "ds.json"))


def test_deepspeed_says_buckets_types_and_batches(tmp_path):
    table = {
        **{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}},
        **{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "overlap_comm": True}},
        **{"activation_checkpointing": {"number_checkpoints": 4}, "gradient_clipping": 0.5, "zzz": 1},
        "communication_data_type": "fp32",
    }
    config = read_deepspeed(written(tmp_path, json.dumps(table), "ds.json"))
    assert plan(config, 8) == Plan.parse(
        "dp=8,microbatches=4,zero=2,bucket=50000000p,overlap_grads=on,remat=full"
    )
    assert config.stack.precision == "mixed_fp16:gradient_sum=float32"
    assert (config.stack.clip, config.unknown) == (0.5, ("zzz",))


def test_deepspeed_in_bfloat16_without_zero_sums_in_float32_and_divides_state(tmp_path):
    """BF16_Optimizer, which data_types choose where no stage of ZeRO is given."""
    for stage, name, precision, said in (
        (0, "deepspeed_bf16", "mixed", "zero=1,bucket=nanotron,overlap_grads=off"),
        (1, "deepspeed", "mixed_bf16_grads", "zero=1,bucket=deepspeed,overlap_grads=off"),
    ):
        table = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        config = read_deepspeed(written(tmp_path, json.dumps(table), "ds.json"))
        assert (config.stack.name, config.stack.precision) == (name, precision)
        assert plan(config, 8) == Plan.parse(f"dp=8,{said},remat=none")
    alone = read_deepspeed(written(tmp_path, '{"bf16": {"enabled": true}, "train_batch_size": 8}', "ds.json"))
    assert plan(alone, 1) == Plan.parse("remat=none")


def test_options_go_before_the_file(tmp_path, capsys):
    text = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    path = written(tmp_path, text + "--vocab-size 100 --bf16 --tensor-model-parallel-size 2 --odd 1", "args")
    out, _ = run(capsys, "simulate", "--megatron-args", path, "--cluster", "dgx-a100")
    assert "dp=4,tp=2,pp=1,microbatches=1" in out
    assert "batch 8" in out
    assert "note: args: not understood, and without effect: --odd" in out
    assert "vocabulary of 100 padded to 256" in out
    assert "precision mixed:" in out
    more = ("--plan", "tp=1,microbatches=2", "--precision", "fp32", "--seq", "16")
    out, _ = run(capsys, "simulate", "--megatron-args", path, "--cluster", "dgx-a100", *more)
    assert "dp=8,tp=1,pp=1,microbatches=2" in out
    assert "precision fp32" in out
    assert "sequences of 16 tokens" in out
    named = ("gpt2:layers=2", "--batch", 16)
    out, _ = run(capsys, "simulate", *named, "--megatron-args", path, "--cluster", "dgx-a100")
    assert "gpt2:layers=2 on dgx-a100" in out
    assert main(["simulate", "--deepspeed", str(DATA / "zero3_auto.json"), "--cluster", "dgx-a100"]) == 2
    assert "says no model; name a model" in capsys.readouterr().err
    assert main(["simulate", "--megatron-args", str(path), "--torchtitan", "x", "--cluster", "dgx-a100"]) == 2
    assert "give one" in capsys.readouterr().err
