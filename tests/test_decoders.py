"""Decoders of every family: parameters as published, meaning against NumPy, work in closed form, plans."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoder_models import FAMILIES, Reference, small
from training_models import assert_same_step, random_inputs

from distsim.cli import main
from distsim.compose import parallelize
from distsim.errors import ImportModelError, PlanError
from distsim.executor import SequentialExecutor
from distsim.hardware import load_cluster
from distsim.importer import import_from_hf, load_model, model_names
from distsim.importer.decoders import decoder_sizes, named_sizes, sizes_from_hf
from distsim.interpret import count_flops
from distsim.ir import Function, Op, all_ops, callees
from distsim.models.decoder import count_parameters
from distsim.models.decoder_sizes import DropoutRates
from distsim.models.parts.attention import GroupedHeads
from distsim.ops import signature_of, work
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate
from distsim.transforms.kernels.attention import set_attention

CONFIGS = Path(__file__).parent / "data" / "configs"
ROWS = list(csv.DictReader((CONFIGS / "params.csv").read_text(encoding="utf-8").splitlines()))

# What the published checkpoints hold, but for buffers and for heads that are stored twice when they are tied.
PUBLISHED = {
    row["name"]: int(row["params"])
    for row in csv.DictReader((CONFIGS.parent / "published_parameters.csv").read_text("utf-8").splitlines())
}


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_parameters_of_a_config_are_those_that_transformers_counts(row):
    made = count_parameters(sizes_from_hf(CONFIGS / f"{row['name']}.json"))
    assert made.params == int(row["params"])
    assert made.active_params == int(row["active_params"])
    assert made.embedding_params == int(row["input_embedding_params"])


@pytest.mark.parametrize("name", model_names())
def test_the_parameters_of_a_name_are_those_published(name):
    count = count_parameters(named_sizes(name))
    if name.startswith("gpt3-"):  # Brown et al. 2020, table 2.1, to the digits given there
        said = {"m": 1e6, "b": 1e9}[name[-1]] * float(name[5:-1])
        assert count.params == pytest.approx(said, rel=0.025)
        return
    assert count.params == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "active"),  # as published: in the model's name or its report
    [
        *[("mixtral-8x7b", 12.9e9), ("mixtral-8x22b", 39.1e9), ("qwen3-30b-a3b", 3.3e9)],
        *[("qwen3-235b-a22b", 22e9), ("deepseek-v2", 21e9), ("deepseek-v3", 37e9)],
    ],
)
def test_active_parameters_are_as_published(name, active):
    assert count_parameters(named_sizes(name)).active_params == pytest.approx(active, rel=0.02)


def matrix_flops(function: Function) -> float:
    """Of products, the layers' for every call."""
    bodies = {callee: _own(callee.ops) for callee in callees(function)}
    return _own(function.ops) + sum(bodies[op.callee] for op in function.ops if op.is_call)


def _own(ops: tuple[Op, ...]) -> float:
    return sum(w.flops for w in (work(signature_of(op)) for op in ops if not op.is_call) if w and w.matrix)


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt3-1.3b", "gpt2"])
def test_the_work_of_gpt_is_that_of_narayanan_et_al(name):
    """96 B s l h^2 (1 + s / 6h + V / 16lh) for a step that recomputes every layer (2021, section 5.1).

    Backward is twice forward, and recomputing makes it four times but for the output head: a forward pass is
    24 B s l h^2 (1 + s / 6h) + 2 B s h V. Both products of attention count in full, as they do there.
    """
    sizes, batch, seq = named_sizes(name), 2, 256
    h, layers, vocab = sizes.hidden, sizes.layers, sizes.vocab
    forward = matrix_flops(load_model(f"{name}:seq={seq},batch={batch},layers={layers}"))
    masked = layers * 2.0 * 2 * batch * seq * seq * h
    # Flash attention does not compute what the mask hides: of s x s products, s (s + 1) / 2.
    computed = masked * (seq + 1) / (2 * seq)
    forward += masked - computed
    step = 4 * forward - 2 * batch * seq * h * vocab
    assert step == pytest.approx(
        96 * batch * seq * layers * h * h * (1 + seq / (6 * h) + vocab / (16 * layers * h)), rel=1e-3
    )


def test_a_training_step_takes_six_flops_for_each_parameter_and_token():
    """6 N, N being the weights of products (Kaplan et al. 2020), beside attention's own products."""
    function = load_model("llama3-8b:layers=4", 1, "seq=128")
    sizes = decoder_sizes("llama3-8b:layers=4")[0]
    weights = count_parameters(sizes).params - sizes.vocab * sizes.hidden
    flops = count_flops(differentiate(function, None)) / 128
    assert flops == pytest.approx(6 * weights, rel=0.01)


# --- meaning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_the_loss_is_that_of_a_decoder_written_out(family, attention):
    function = small(family, 3, attention)
    inputs = random_inputs(function)
    given = {value.name: array for value, array in zip(function.inputs, inputs, strict=True)}
    pairs = zip(given.pop("tokens"), given.pop("labels"), strict=True)
    reference = Reference(FAMILIES[family], given)
    (loss,) = SequentialExecutor().compute(function, inputs)
    np.testing.assert_allclose(loss, np.mean([reference.loss(*pair) for pair in pairs]), rtol=1e-9)


def fused(function: Function) -> list[dict[str, object]]:
    ops = [op for op in all_ops(function) if op.op_type == "Attention"]
    return [dict(op.attributes) for op in ops]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_that_is_recognised_is_the_one_that_is_built(family):
    """Causal masks, windows, caps and scales are read off the written-out form as the builder knows them."""
    written, built = small(family, 1, "math"), small(family, 1, "flash")
    assert fused(set_attention(written, "flash")) == fused(built) != []
    assert fused(set_attention(built, "math")) == fused(written) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_computes_what_one_device_computes(family):
    joint = differentiate(small(family), Adam())
    inputs = random_inputs(joint)
    program = parallelize(joint, Plan(2, 2, 2, 2), load_cluster("dgx-a100"))
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))


def test_layers_that_are_alike_are_calls_of_one_callee():
    assert len(callees(load_model("gemma2-2b", 1, "seq=8192"))) == 2  # every other layer has a window
    assert len(callees(load_model("gemma2-2b", 1, "seq=4096"))) == 1  # a window of all tokens is none
    kinds = [op.callee.name for op in load_model("deepseek-v3:layers=5", 1, "seq=64").ops if op.is_call]
    assert kinds == ["dense_layer"] * 3 + ["expert_layer"] * 2


def rates_of(function: Function) -> list[float]:
    return [float(op.attributes["ratio"].array) for op in function.ops if op.op_type == "Dropout"]


def test_dropout_is_where_its_rates_say():
    rates = "embedding_dropout=0.1,attention_dropout=0.2,residual_dropout=0.3"
    function = load_model(f"gpt2:layers=1,{rates}", 1, "seq=8")
    (layer,) = callees(function)
    assert rates_of(function) == [0.1] and rates_of(layer) == [0.3, 0.3]
    assert [op.attributes["dropout"] for op in layer.ops if op.op_type == "Attention"] == [0.2]
    assert differentiate(function, Adam()).outputs


# --- names and options ----------------------------------------------------------------------------


def test_options_override_fields_and_batch_and_seq_are_bindings():
    function = load_model("llama3-8b:layers=2,hidden=64,kv_heads=4,ffn=96,vocab=32,seq=16", 3)
    shapes = {value.name: value.type.shape for value in function.inputs}
    assert shapes["tokens"] == (3, 16) and shapes["h1.k.w"] == (64, 8) and shapes["h0.up.w"] == (64, 96)
    assert load_model("llama3-8b:layers=1").inputs[0].type.shape == (8, 8192)
    assert load_model("mistral-7b:layers=1").inputs[0].type.shape == (8, 8192)
    assert load_model("llama2-7b:layers=1").inputs[0].type.shape == (8, 4096)
    assert function.notes == ("sequences of 16 tokens",)
    longer = load_model("llama2-7b:layers=1,hidden=64,heads=4,ffn=96,vocab=32", 1, "seq=4097")
    assert longer.notes == ("sequences of 4097 tokens, past the 4096 of its configuration",)


@pytest.mark.parametrize(("multiple", "rows"), [(1, 50257), (128, 50304), (256, 50432)])
def test_a_vocabulary_is_padded_to_a_multiple(multiple, rows):
    """As Megatron-LM does for GPT-2, 50304 being its figure of one tensor-parallel rank."""
    function = load_model("gpt2:layers=1,hidden=8,heads=2", 1, "seq=8", vocabulary_multiple=multiple)
    table = next(value for value in function.parameters if value.type.shape[0] > 50000)
    assert table.type.shape[0] == rows
    said = f"vocabulary of 50257 padded to {rows}, a multiple of {multiple}"
    assert (said in function.notes) == (multiple > 1)


def test_a_config_is_read_from_its_file_with_options(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES["qwen3"]), encoding="utf-8")
    function = load_model(f"{path}:layers=3", 2, "seq=8")
    assert [op.op_type for op in function.ops].count("Call") == 3
    whole = import_from_hf(path, batch=2, seq=8)
    assert len(whole.parameters) == len(import_from_hf(FAMILIES["qwen3"], 2, 8).parameters)


@pytest.mark.parametrize(
    ("source", "bindings", "words"),
    [
        ("lama3-8b", "", ("'lama3-8b'", "did you mean llama3-8b")),
        ("Mixtral-8x7B:layers=2", "", ("did you mean mixtral-8x7b",)),
        ("llama3-8b:depth=3", "", ("'depth'", "layers, hidden")),
        ("llama3-8b:layers=two", "", ("layers=two",)),
        ("llama3-8b:layers=20000", "", ("layers=20000", "10000")),
        ("llama3-8b:experts=4", "", ("'experts'",)),
        ("llama3-8b:capacity=1.5", "", ("no experts", "capacity")),
        ("mixtral-8x7b:depth=3", "", ("concentration, capacity, pad, seed",)),
        ("mixtral-8x7b:ffn=64", "", ("ffn=64", "expert_ffn")),
        ("mixtral-8x7b:top_k=9", "", ("top_k=9", "8 experts")),
        ("llama3-8b:kv_heads=5", "", ("kv_heads=5", "heads=32")),
        ("llama3-8b:hidden=4100", "", ("heads=32", "hidden=4100")),
        ("llama3-8b:attention_dropout=1", "", ("attention_dropout=1", "below 1")),
        ("llama3-8b:tied=1", "", ("tied=1", "true or false")),
        ("llama3-8b:seq=8", "seq=16", ("seq is given twice, 8 and 16",)),
        ("llama3-8b", "path=4", ("'path'", "batch and seq")),
        ("gpt2:layers=1", "seq=2048", ("seq=2048", "1024 positions")),
        ("llama3-8b", "seq=99999999", ("seq=99999999", "2^24")),
        ("mixtral-8x7b:experts=70000", "", ("experts=70000", "65536")),
    ],
)
def test_what_is_not_usable_is_named(source, bindings, words):
    with pytest.raises((ImportModelError, PlanError)) as caught:
        load_model(source, bindings=bindings)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_batch_that_is_bound_to_another_size_is_named_with_both():
    with pytest.raises(ImportModelError, match="batch is given twice, 4 and 8"):
        load_model("llama3-8b", 8, "batch=4")
    with pytest.raises(ImportModelError, match="batch is given twice, 4 and 8"):
        load_model("llama3-8b:batch=4", 8, "batch=8")


def test_options_that_a_model_does_not_have_are_not_offered():
    with pytest.raises(ImportModelError) as caught:
        load_model("gpt2:n_layer=3")
    assert "seq" in str(caught.value) and "capacity" not in str(caught.value)


def test_the_command_lists_names_and_counts(capsys, tmp_path):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "params", "active_params", "embedding_params"]
    assert [line.split()[0] for line in lines[1:]] == list(model_names())
    path = str(CONFIGS / "gpt2.json")
    assert main(["models", "mixtral-8x7b", path, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "name": "mixtral-8x7b",
        "params": 46702792704,
        "active_params": 12879925248,
        "embedding_params": 131072000,
    }
    assert (second["name"], second["params"]) == (path, 124439808)
    (tmp_path / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    gpt = "gpt:layers=12,hidden=768,vocab=50257"
    assert main(["models", str(tmp_path), gpt, "moe", "mlp:layers=2,width=8", "--json"]) == 0
    counts = [[*each.values()][1:] for each in json.loads(capsys.readouterr().out)]
    # The head of gpt has its own weight.
    assert counts[:2] == [[124439808, 124439808, 38597376], [163037184, 163037184, 38597376]]
    assert counts[2:] == [[*first.values()][1:], [128, 128, 0]]
    assert main(["models", "nosuch"]) == 2
    assert main(["models", "llama3-8b:batch=3,seq=99999999"]) == 2
    assert "do not depend on batch, seq" in capsys.readouterr().err
    assert main(["models", "nosuch", "gpt2", "neither"]) == 2  # what can be counted is
    out, err = capsys.readouterr()
    assert "124,439,808" in out and all(
        f"no model is named {name!r}" in err for name in ("nosuch", "neither")
    )


def test_a_field_that_a_file_leaves_out_is_as_transformers_class_has_it():
    def without(family, *names):
        return {key: value for key, value in FAMILIES[family].items() if key not in names}

    gemma = sizes_from_hf(without("gemma", "head_dim"))
    assert gemma.attention.size(gemma.hidden) == 256 and gemma.tied
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    gemma2 = sizes_from_hf(without("gemma2", *caps, "sliding_window"))
    assert (gemma2.attention.softcap, gemma2.softcap, gemma2.attention.window) == (50, 30, 4096)
    none = sizes_from_hf(FAMILIES["gemma2"] | dict.fromkeys((*caps, "sliding_window", "head_dim")))
    assert (none.attention.softcap, none.softcap, none.attention.window) == (0, 0, 0)
    assert none.attention.size(16) == 4
    gpt = sizes_from_hf(without("gpt2", "embd_pdrop", "attn_pdrop", "resid_pdrop"))
    assert gpt.dropout == DropoutRates(0.1, 0.1, 0.1)
    assert sizes_from_hf(without("deepseek_v2", "q_lora_rank")).attention.q_lora == 1536
    assert sizes_from_hf(
        without("mistral", "num_key_value_heads") | {"num_attention_heads": 8}
    ).attention == (GroupedHeads(8, window=3))
    mixtral = sizes_from_hf(without("mixtral", "rms_norm_eps", "rope_theta"))
    assert (mixtral.norm.epsilon, mixtral.positions.theta) == (1e-5, 1e6)


def test_positions_of_a_part_of_a_head_are_said_in_any_of_three_ways():
    """As files of the class say them: transformers 4 wrote two of its fields a second time."""
    base = FAMILIES["gpt_neox"]
    rope = {"rope_theta": 50, "partial_rotary_factor": 0.5}
    new = {key: value for key, value in base.items() if not key.startswith("rotary")} | {
        "rope_parameters": rope
    }
    saved_again = new | {"partial_rotary_factor": 0.5}
    for table in (
        base,
        base | rope,
        new,
        saved_again,
        new | {"rope_parameters": {**rope, "rope_type": "default"}},
    ):
        sizes = sizes_from_hf(table)
        assert (sizes.attention.rotary_dims, sizes.positions.theta) == (2, 50.0)
    assert (
        sizes_from_hf(base | {"rope_parameters": {"partial_rotary_factor": None}}).attention.rotary_dims == 2
    )
    odd = base | {"hidden_size": 20, "rotary_pct": 0.4}
    assert sizes_from_hf(odd).attention == GroupedHeads(4, bias=True, out_bias=True, rotary_dims=2)


def test_what_a_file_names_and_is_not_built_is_said():
    family = FAMILIES["deepseek_v2"]
    more = {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    plain, noted = (set(import_from_hf(table, 2, 4).notes) for table in (family, family | more))
    assert sorted(noted - plain) == [
        "num_nextn_predict_layers=1: multi-token prediction is not built",
        "quantization_config is of the checkpoint; --precision says how it is trained",
    ]


def test_windows_of_qwen_are_where_transformers_has_them():
    qwen = {"model_type": "qwen3", "sliding_window": 3, "use_sliding_window": True}
    dense = sizes_from_hf({**FAMILIES["qwen3"], **qwen, "max_window_layers": 1})
    assert dense.attention.windowed == (False, True)
    experts = sizes_from_hf(
        {**FAMILIES["qwen3_moe"], **qwen, "model_type": "qwen3_moe", "max_window_layers": 2}
    )
    assert experts.attention.window == 3 and all(experts.attention.windowed)
    assert sizes_from_hf({**FAMILIES["qwen3_moe"], "sliding_window": 3}).attention.window == 0


def test_a_slip_in_the_name_of_a_field_is_said():
    config = {**FAMILIES["mistral"], "sliding_windw": 2}
    del config["sliding_window"]
    (said,) = sizes_from_hf(config).left_out
    assert said.startswith("sliding_windw is not read; did you mean sliding_window?")
    whole = [named_sizes(name) for name in model_names()]
    whole += [sizes_from_hf(each) for each in (*FAMILIES.values(), *CONFIGS.glob("*.json"))]
    assert not [said for sizes in whole for said in sizes.left_out if "is not read" in said]


def test_the_text_of_gemma_3_is_read_where_images_are():
    whole = {"model_type": "gemma3", "text_config": {**FAMILIES["gemma3_text"]}, "vision_config": {}}
    text, alone = sizes_from_hf(whole), sizes_from_hf(FAMILIES["gemma3_text"])
    assert replace(text, left_out=()) == alone and "images" in text.left_out[0] and not alone.left_out
    for name, layers in (("gemma3-4b:layers=62", 62), ("gemma3-27b", 62), ("gemma3-1b", 26)):
        heads = decoder_sizes(name)[0].attention
        assert [n for n in range(layers) if not heads.window_of(n)] == list(range(5, layers, 6))
    rotated = import_from_hf(FAMILIES["gemma3_text"], 1, 4)
    assert len(callees(rotated)) == 2
    assert len(callees(import_from_hf(FAMILIES["gemma3_text"], 1, 3))) == 1  # windows of the whole sequence


def test_the_command_simulates_a_config(capsys):
    path = CONFIGS / "Qwen3-0.6B.json"
    arguments = [f"{path}:layers=2", "--cluster", "dgx-h100", "--plan", "dp=2,tp=2", "--batch", "4"]
    assert main(["simulate", *arguments, "--seq", "256"]) == 0
    assert "note: sequences of 256 tokens" in capsys.readouterr().out
