"""What a ``config.json`` says by leaving a field out: the defaults of transformers' classes, by family.

Source: ``transformers/models/*/configuration_*.py`` of transformers 5.23.0, and for ``rope_theta`` the
``default_theta`` there and in ``modeling_rope_utils.py``. None is null: of ``num_key_value_heads`` as many as
heads, of ``head_dim`` what heads divide hidden_size into, of ``n_inner`` 4 x n_embd, else none of it. No
class has ``moe_layer_freq`` and ``scoring_func``: they are as in the code that came with the checkpoints.

Sizes in which the models of a family differ (layers, hidden, heads, vocabulary, experts, ranks) are not in
here, though the classes have those of some model: a file that does not say them describes none.
"""

from __future__ import annotations

_ROTARY: dict[str, object] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
"""What most families with rotary positions share."""

_QWEN: dict[str, object] = {
    **_ROTARY,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

_GEMMA: dict[str, object] = {
    **_ROTARY,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
}

_DEEPSEEK: dict[str, object] = {
    **_ROTARY,
    "q_lora_rank": 1536,
    "attention_bias": False,
    "moe_layer_freq": 1,
}

CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {**_ROTARY, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": {
        **_ROTARY,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {
        **_ROTARY,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "qwen2_moe": {
        **_QWEN,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    "gemma": {**_GEMMA, "num_key_value_heads": 16},
    "gemma2": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "olmo2": {
        **_ROTARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    "phi3": {
        **_ROTARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
        "resid_pdrop": 0.0,
    },
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "opt": {
        "activation_function": "relu",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "rotary_emb_base": 10_000.0,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    },
    "falcon": {
        "num_kv_heads": None,
        "ffn_hidden_size": None,
        "num_ln_in_parallel_attn": None,
        "activation": "gelu",
        "rope_theta": 10_000.0,
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        "num_key_value_heads": 2,
        "head_dim": None,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "use_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        "max_position_embeddings": 2048,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
    },
}
"""By ``model_type``, what each field is where a file lacks it; one that is not listed must be given."""
