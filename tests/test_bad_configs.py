"""A config is a stranger's file: what is missing or makes no sense is refused by field, at once."""

import copy
import json
import math
import time

import pytest
from decoder_models import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from said import says

from distsim.errors import DistsimError, ImportModelError, PlanError
from distsim.importer import import_from_hf, load_model
from distsim.importer.configs import BatchSizes
from distsim.importer.decoders.class_defaults import CLASS_DEFAULTS
from distsim.importer.decoders.config_fields import MAX_CONFIG_BYTES

LLAMA = FAMILIES["llama"]


def refused(config: object, batch: int = 1) -> str:
    """Why a config is refused."""
    start = time.perf_counter()
    with pytest.raises(ImportModelError) as caught:
        import_from_hf(config, batch, 4)
    assert time.perf_counter() - start < 10
    assert len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"model_type": None}, ("model_type=null", "llama, mistral")),
        ("llama", {"model_type": "lama"}, ("model_type='lama'", "did you mean llama")),
        ("llama", {"model_type": "bert"}, ("model_type='bert'", "deepseek_v3")),
        ("llama", {"model_type": 3}, ("model_type=3",)),
        ("llama", {"model_type": ["llama"]}, ("model_type=a list of 1",)),
        ("llama", {"hidden_size": None}, ("hidden_size=null", "whole number")),
        ("llama", {"rms_norm_eps": None}, ("rms_norm_eps=null", "positive")),
        ("llama", {"hidden_size": "4096"}, ("hidden_size='4096'", "whole number")),
        ("llama", {"hidden_size": -16}, ("hidden_size=-16",)),
        ("llama", {"hidden_size": 16.0}, ("hidden_size=16.0",)),
        ("llama", {"hidden_size": True}, ("hidden_size=True",)),
        ("llama", {"hidden_size": {"a": [1]}}, ("hidden_size=a table of 1",)),
        ("llama", {"hidden_size": 10**5000}, ("hidden_size=a number of 16610 bits",)),
        ("llama", {"hidden_size": math.nan}, ("hidden_size=nan",)),
        ("llama", {"rms_norm_eps": math.inf}, ("rms_norm_eps=inf",)),
        ("llama", {"num_hidden_layers": 10**12}, ("num_hidden_layers=1000000000000", "to 250")),
        ("gpt2", {"n_layer": 251}, ("n_layer=251", "to 250")),
        ("llama", {"num_hidden_layers": 0}, ("num_hidden_layers=0",)),
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            ("num_attention_heads=3", "hidden_size=16"),
        ),
        ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1}, ("num_attention_heads=16", "even")),
        ("llama", {"num_key_value_heads": 3}, ("num_key_value_heads=3", "num_attention_heads=4")),
        ("llama", {"head_dim": 5}, ("head_dim=5", "even")),
        ("llama", {"vocab_size": 2**31 - 1, "hidden_size": 2**30}, ("vocab x hidden", "2^46")),
        ("llama", {"intermediate_size": 2**31 - 1, "hidden_size": 2**20}, ("hidden x ffn", "2^46")),
        ("llama", {"tie_word_embeddings": 1}, ("tie_word_embeddings=1", "true or false")),
        ("llama", {"attention_bias": "no"}, ("attention_bias='no'",)),
        ("llama", {"hidden_act": "mish"}, ("hidden_act='mish'", "silu")),
        ("llama", {"attention_dropout": 1.0}, ("attention_dropout=1.0", "below 1")),
        ("llama", {"attention_dropout": -0.1}, ("attention_dropout=-0.1",)),
        ("llama", {"rope_parameters": 5}, ("rope_parameters=5", "table")),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, ("rope_parameters: rope_theta='big'",)),
        ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5", "not modelled")),
        ("mistral", {"sliding_window": 0}, ("sliding_window=0",)),
        ("mixtral", {"num_local_experts": None}, ("num_local_experts=null",)),
        ("mixtral", {"num_experts_per_tok": 5}, ("num_experts_per_tok=5", "from 1 to 4")),
        ("mixtral", {"num_local_experts": 10**9}, ("num_local_experts=1000000000", "65536")),
        ("qwen2", {"layer_types": ["full_attention"]}, ("layer_types=a list of 1", "2 items")),
        ("qwen2", {"layer_types": ["full", "none"]}, ("layer_types", "sliding_attention or full_attention")),
        ("qwen3_moe", {"mlp_only_layers": [7]}, ("mlp_only_layers", "0 to 1")),
        ("smollm3", {"no_rope_layers": [1]}, ("no_rope_layers=a list of 1", "2 items")),
        ("smollm3", {"no_rope_layers": [1, 2]}, ("no_rope_layers", "1 where a layer has positions")),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step=0",)),
        ("gemma2", {"attn_logit_softcapping": -1.0}, ("attn_logit_softcapping=-1.0",)),
        ("gemma3_text", {"sliding_window_pattern": 0}, ("sliding_window_pattern=0",)),
        ("gemma3_text", {"use_bidirectional_attention": True}, ("use_bidirectional_attention=True",)),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": "x"}}},
            ("rope_parameters: sliding_attention: rope_theta='x'",),
        ),
        ("qwen2_moe", {"shared_expert_intermediate_size": 7}, ("a multiple of moe_intermediate_size=6",)),
        ("olmoe", {"clip_qkv": 8.0}, ("clip_qkv=8.0 must be null", "not modelled")),
        ("glm4", {"partial_rotary_factor": 0.3}, ("partial_rotary_factor=0.3", "of its 4 dimensions")),
        ("granite", {"logits_scaling": 0}, ("logits_scaling=0", "a positive number")),
        ("gpt2", {"n_positions": None}, ("n_positions=null",)),
        ("gpt2", {"n_head": 3}, ("n_head=3", "n_embd=16")),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx=True",)),
        ("gpt_neox", {"rotary_pct": 0.3}, ("rotary_pct=0.3", "even number of its 4 dimensions")),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 2}}, ("partial_rotary_factor=2",)),
        ("gpt_neox", {"num_key_value_heads": 2}, ("num_key_value_heads=2 must be 4", "does not read")),
        ("gpt_neox", {"partial_rotary_factor": 0.25}, ("partial_rotary_factor=0.25 must be 0.5",)),
        ("gpt_neox", {"rope_theta": 77.0}, ("rope_theta=77.0 must be 50.0",)),
        ("phi3", {"partial_rotary_factor": 0.3}, ("partial_rotary_factor=0.3", "of its 4 dimensions")),
        ("opt", {"word_embed_proj_dim": 8}, ("word_embed_proj_dim=8", "16: the rest is not modelled")),
        ("opt", {"do_layer_norm_before": False}, ("do_layer_norm_before=False", "not modelled")),
        ("opt", {"num_attention_heads": 3}, ("num_attention_heads=3", "hidden_size=16")),
        ("phi3", {"embd_pdrop": 0.1}, ("embd_pdrop=0.1", "not modelled")),
        ("stablelm", {"qk_layernorm": True}, ("qk_layernorm=True", "not modelled")),
        ("stablelm", {"hidden_dropout": 0.1}, ("hidden_dropout=0.1", "not modelled")),
        ("stablelm", {"head_dim": 8}, ("head_dim=8 must be 4", "does not read")),
        ("starcoder2", {"num_key_value_heads": 3}, ("num_key_value_heads=3", "num_attention_heads=4")),
        ("starcoder2", {"norm_epsilon": 0}, ("norm_epsilon=0", "a positive number")),
        ("falcon", {"num_ln_in_parallel_attn": 2}, ("num_ln_in_parallel_attn=2", "new_decoder_architecture")),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, ("num_kv_heads=2 must be 4",)),
        ("falcon", {"parallel_attn": False, "attention_dropout": 0.1}, ("attention_dropout=0.1",)),
        ("falcon", {"ff_factor": 2}, ("ff_factor=2", "not modelled")),
        ("falcon", {"alibi": True}, ("alibi=True", "not modelled")),
        ("falcon", {"hidden_dropout": 0.1}, ("hidden_dropout=0.1", "not modelled")),
        ("falcon grouped", {"num_kv_heads": 3}, ("num_kv_heads=3", "num_attention_heads=4")),
        ("falcon", {"num_attention_heads": 16}, ("num_attention_heads=16", "even width")),
        ("deepseek_v2", {"kv_lora_rank": None}, ("kv_lora_rank=null",)),
        ("deepseek_v2", {"qk_rope_head_dim": 3}, ("qk_rope_head_dim=3", "even")),
        ("deepseek_v3", {"scoring_func": "tanh"}, ("scoring_func='tanh'", "softmax, sigmoid")),
        ("deepseek_v3", {"n_group": 3}, ("n_group=3", "a divisor of the 4 experts")),
        ("deepseek_v3", {"topk_group": 3}, ("topk_group=3", "of the 2 groups")),
        ("deepseek_v2", {"topk_method": "best"}, ("topk_method='best'", "group_limited_greedy")),
    ],
)
def test_a_field_that_is_not_usable_is_named_with_its_value(family, changes, words):
    reason = refused({**FAMILIES[family], **changes})
    assert [word for word in words if word not in reason] == [], reason


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_a_file_leaves_out_are_asked_for(family):
    """No file is completed with the sizes of some other model, as transformers' classes would."""
    optional = CLASS_DEFAULTS[FAMILIES[family]["model_type"]].keys() | {"rope_parameters"}
    for name in FAMILIES[family].keys() - optional:
        short = {key: value for key, value in FAMILIES[family].items() if key != name}
        assert f"{name} is missing" in refused(short)


def test_what_follows_from_a_missing_field_is_said():
    reason = refused(
        {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"} | {"model_type": "qwen2"}
    )
    assert "num_key_value_heads is missing, which makes it 32; it must be a divisor" in reason


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"[1, 2]", "holds a list of 2"),
        (b"3", "holds 3"),
        (b"{", "not a configuration in JSON"),
        (b"\xff\xfe\x00", "not a configuration in JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": ' + b"9" * 9000 + b"}", "not a configuration in JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "' + b"x" * MAX_CONFIG_BYTES + b'"}', str(MAX_CONFIG_BYTES)),
    ],
    ids=range(10),
)
def test_a_file_that_is_no_config(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert words in refused(path)


def test_a_path_that_is_no_file(tmp_path):
    assert "No such file" in refused(tmp_path / "config.json")
    (tmp_path / "folder.json").mkdir()
    assert "not a regular file" in refused(tmp_path / "folder.json")
    with pytest.raises(ImportModelError, match="model_type is missing"):
        (tmp_path / "empty.json").write_text("{}", encoding="utf-8")
        load_model(str(tmp_path / "empty.json"))


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([10**12, 2**31 - 1, 10**400, 0.5, -1.0, math.inf, math.nan, "", "silu", "4096"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["rope_theta", "x"]), st.integers(-1, 1), max_size=2),
)


@settings(max_examples=150)
@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_whatever_fields_hold_is_a_model_or_refused(family, data):
    """A config with a few fields replaced by anything builds or raises an error of ours, and quickly."""
    config = copy.deepcopy(FAMILIES[family])
    known = sorted(
        {*config, "head_dim", "rope_theta", "sliding_window", "layer_types", "attn_pdrop"} - {"model_type"}
    )
    for name in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)):
        config[name] = data.draw(_VALUES)
    start = time.perf_counter()
    try:
        function = import_from_hf(config, 1, 2)
        assert function.parameters
    except DistsimError as error:
        assert str(error)
    assert time.perf_counter() - start < 20


def test_null_is_none_of_it_and_unknown_fields_are_of_no_matter():
    plain = import_from_hf(LLAMA, 1, 4)
    more = {
        "head_dim": None,
        "attention_bias": None,
        "bos_token_id": 1,
        "architectures": ["LlamaForCausalLM"],
    }
    again = import_from_hf(json.loads(json.dumps({**LLAMA, **more})), 1, 4)
    assert [v.type for v in again.parameters] == [v.type for v in plain.parameters]


def test_batches_that_do_not_divide_say_what_would():
    with says(PlanError, "batch of 10", "dp=4", "--batch 8"):
        BatchSizes(10, 2).of(4)
    assert BatchSizes(None, 2, microbatches=3).of(4) == (24, 3)
    assert BatchSizes(24, 2, microbatches=3).of(4) == (24, 3)
    with says(PlanError, "3 microbatches of 2", "4 data-parallel ranks, not 8", "--batch 48"):
        BatchSizes(24, 2, microbatches=3).of(8)
    assert BatchSizes(24, 2, microbatches=3).of(8, 48) == (48, 3)
    with says(PlanError, "--batch"):
        BatchSizes().of(4)
