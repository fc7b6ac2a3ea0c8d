"""Small decoders of every family, as config.json tables, and what each computes, written out in NumPy."""

from typing import Any

import numpy as np

from distsim.importer.decoders import sizes_from_hf
from distsim.ir import Float64, Function
from distsim.models.decoder import decoder
from distsim.models.routing import Loads, Routing

VOCAB, SEQ = 16, 6

_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
_LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_shared_experts": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA, "rope_parameters": {"rope_theta": 50.0}},
    "llama biased": {
        **{"model_type": "llama", **_LLAMA, "num_key_value_heads": None},
        **{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    },
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": 3},
    "mixtral": {
        **{"model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    },
    "qwen2": {
        **{"model_type": "qwen2", **_LLAMA, "use_sliding_window": True},
        **{"sliding_window": 2, "max_window_layers": 1},
    },
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 6, "tie_word_embeddings": True},
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", **_LLAMA, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 6, "decoder_sparse_step": 2},
    },
    "gemma": {"model_type": "gemma", **_LLAMA, "num_key_value_heads": 1, "head_dim": 6},
    "gemma2": {
        **{"model_type": "gemma2", **_LLAMA, "sliding_window": 3, "query_pre_attn_scalar": 9, "head_dim": 4},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    },
    "gemma3_text": {
        **{"model_type": "gemma3_text", **_LLAMA, "sliding_window": 3, "query_pre_attn_scalar": 9},
        **{"head_dim": 4, "sliding_window_pattern": 2, "rope_theta": 50.0, "rope_local_base_freq": 7.0},
    },
    "glm4": {
        **{"model_type": "glm4", **_LLAMA, "head_dim": 4, "attention_bias": True},
        **{"rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5},
    },
    "granite": {
        **{"model_type": "granite", **_LLAMA, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
        **{"residual_multiplier": 0.4, "logits_scaling": 5.0},
    },
    "olmoe": {
        **{"model_type": "olmoe", **_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
        "rms_norm_eps": 1e-6,
    },
    "olmo2": {"model_type": "olmo2", **_LLAMA, "rms_norm_eps": 1e-6},
    "smollm3": {
        **{"model_type": "smollm3", **_LLAMA, "no_rope_layer_interval": 2, "use_sliding_window": True},
        **{"sliding_window": 3, "rope_theta": 1e4, "rms_norm_eps": 1e-5},
    },
    "cohere2": {
        **{"model_type": "cohere2", **_LLAMA, "logit_scale": 0.5, "sliding_window": 3},
        "sliding_window_pattern": 2,
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", **_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 6, "shared_expert_intermediate_size": 12, "use_sliding_window": True},
        **{"sliding_window": 2, "max_window_layers": 1},
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 8,
        "vocab_size": VOCAB,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    },
    "opt": {
        **{"model_type": "opt", "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "dropout": 0.0},
        **{"num_attention_heads": 4, "max_position_embeddings": 8, "vocab_size": VOCAB},
    },
    "gpt_neox": {
        **{"model_type": "gpt_neox", **_LLAMA, "num_key_value_heads": None, "rotary_pct": 0.5},
        **{"rotary_emb_base": 50.0, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    },
    "gpt_neox sequential": {
        **{"model_type": "gpt_neox", **_LLAMA, "num_key_value_heads": None, "rotary_pct": 1.0},
        **{"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    },
    "falcon": {
        **{"model_type": "falcon", "activation": "gelu_new", "hidden_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "vocab_size": VOCAB},
    },
    "falcon grouped": {
        **{"model_type": "falcon", "activation": "gelu_new", "hidden_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
        **{"vocab_size": VOCAB, "ffn_hidden_size": 24, "tie_word_embeddings": False},
    },
    "phi3": {
        **{"model_type": "phi3", **_LLAMA, "partial_rotary_factor": 0.5, "sliding_window": 3},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    },
    "starcoder2": {"model_type": "starcoder2", **_LLAMA, "sliding_window": 3},
    "stablelm": {
        **{"model_type": "stablelm", **_LLAMA, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    },
    "stablelm parallel": {
        **{"model_type": "stablelm", **_LLAMA, "use_parallel_residual": True},
        **{"rope_parameters": {"partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
    },
    "deepseek_v2": {
        **{"model_type": "deepseek_v2", **_LLAMA, **_LATENT, **_EXPERTS, "first_k_dense_replace": 1},
        **{"routed_scaling_factor": 3.0, "q_lora_rank": None},
    },
    "deepseek_v3": {
        **{
            "model_type": "deepseek_v3",
            **_LLAMA,
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": 8,
            "moe_layer_freq": 2,
            "first_k_dense_replace": 0,
            **{"n_group": 2, "topk_group": 1},
        },
    },
}


def small(family: str, batch: int = 4, attention: str = "flash", **changes: object) -> Function:
    """A small decoder of a family in float64, whose experts have room for every token."""
    sizes = sizes_from_hf({**FAMILIES[family], **changes})
    layers = sum(map(sizes.has_experts, range(sizes.layers)))
    experts = sizes.experts.experts if sizes.experts else 0
    loads = Loads(routings=[Routing((SEQ,) * experts, (SEQ,) * experts)] * layers)
    return decoder(sizes, batch, SEQ, Float64(), loads, attention=attention)


# --- what they compute --------------------------------------------------------------------------------


Weights = dict[str, np.ndarray]

GPT = {"norm1": "ln1", "norm2": "ln2", "norm": "ln_f", "o": "proj", "up": "fc", "down": "out", "embed": "wte"}


class Reference:
    """The loss of a decoder for one sequence, token by token and head by head, from its config alone."""

    def __init__(self, config: dict[str, Any], weights: Weights) -> None:
        self.config, self.all = config, weights
        self.family = config["model_type"]
        self.gpt, self.gemma = self.family in ("gpt2", "opt"), self.family.startswith("gemma")
        self.centred = self.gpt or self.family in (
            "gpt_neox",
            "falcon",
            "starcoder2",
            "stablelm",
            "cohere2",
        )  # LayerNorm
        self.plain = self.centred and self.family not in ("stablelm", "cohere2")
        self.parallel = config.get("use_parallel_residual", self.family in ("gpt_neox", "falcon", "cohere2"))
        self.hidden = config.get("hidden_size") or config["n_embd"]
        self.heads = config.get("num_attention_heads") or config["n_head"]
        self.layers = config.get("num_hidden_layers") or config["n_layer"]

    def named(self, name: str) -> str:
        return GPT.get(name, name) if self.gpt else name

    def norm(self, x: np.ndarray, w: Weights, name: str, offset: float | None = None) -> np.ndarray:
        name = self.named(name)
        if self.centred:
            middle = x - x.mean(-1, keepdims=True)
            spread = np.sqrt((middle**2).mean(-1, keepdims=True) + 1e-5)
            return middle / spread * w[f"{name}.scale"] + w.get(f"{name}.bias", 0.0)
        shift = float(self.gemma) if offset is None else offset
        size = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.get("rms_norm_eps", 1e-6))
        return x / size * (w[f"{name}.scale"] + shift)

    def linear(self, x: np.ndarray, w: Weights, name: str) -> np.ndarray:
        return x @ w[f"{self.named(name)}.w"] + w.get(f"{self.named(name)}.b", 0.0)

    def rotated(self, head: np.ndarray, layer: int = 0) -> np.ndarray:
        if self.gpt or (layer % 2 and self.family in ("smollm3", "cohere2")):
            return head
        theta = self.config.get("rotary_emb_base", 10_000.0)
        if self.family == "gemma3_text":
            theta = self.config["rope_theta" if layer % 2 else "rope_local_base_freq"]
        rope = self.config.get("rope_parameters", {})
        theta = rope.get("rope_theta", theta)
        share = self.config.get("rotary_pct", self.config.get("partial_rotary_factor", 1.0))
        share = rope.get("partial_rotary_factor", share)
        head, rest = np.split(head, [int(head.shape[1] * share)], axis=1)
        half = head.shape[1] // 2
        turns = np.exp(1j * np.outer(np.arange(len(head)), theta ** (-np.arange(half) / half)))
        turned = (head[:, :half] + 1j * head[:, half:]) * turns
        return np.concatenate([turned.real, turned.imag, rest], axis=1)

    def window(self, layer: int) -> int:
        config = self.config
        whole = SEQ
        if self.family in ("mistral", "phi3", "starcoder2"):
            return config["sliding_window"]
        if self.family in ("gemma2", "gemma3_text", "cohere2"):
            return whole if layer % 2 else config["sliding_window"]
        if self.family == "smollm3":
            return config["sliding_window"] if layer % 2 else whole
        if self.family == "qwen2_moe":
            return whole if layer else config["sliding_window"]
        if self.family == "qwen2":
            return config["sliding_window"] if layer >= config["max_window_layers"] else whole
        return whole

    def head(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int) -> np.ndarray:
        scale = self.config.get("query_pre_attn_scalar", query.shape[1]) ** -0.5
        scale = self.config.get("attention_multiplier", scale)
        cap = self.config.get("attn_logit_softcapping")
        rows = []
        for place in range(len(query)):
            seen = slice(max(0, place - window + 1), place + 1)
            scores = key[seen] @ query[place] * scale
            scores = cap * np.tanh(scores / cap) if cap else scores
            chances = np.exp(scores - scores.max())
            rows.append(chances / chances.sum() @ value[seen])
        return np.stack(rows)

    def grouped(self, x: np.ndarray, w: Weights, layer: int) -> np.ndarray:
        groups = self.config.get("num_key_value_heads") or self.heads
        if self.family == "falcon":
            groups = self.config.get("num_kv_heads", 1)
        parts = {"q": self.heads, "k": groups, "v": groups}
        made = {name: self.linear(x, w, name) for name in parts}
        if self.family.startswith("olmo"):
            made |= {name: self.norm(made[name], w, f"{name}_norm") for name in ("q", "k")}
        query, key, value = (np.split(made[name], count, axis=1) for name, count in parts.items())
        if self.family.startswith("qwen3") or self.family == "gemma3_text":
            query = [self.norm(each, w, "q_norm") for each in query]
            key = [self.norm(each, w, "k_norm") for each in key]
        return np.concatenate(
            [
                self.head(
                    self.rotated(each, layer),
                    self.rotated(key[h * groups // self.heads], layer),
                    value[h * groups // self.heads],
                    self.window(layer),
                )
                for h, each in enumerate(query)
            ],
            axis=1,
        )

    def latent(self, x: np.ndarray, w: Weights) -> np.ndarray:
        config = self.config
        plain, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
        query = self.norm(self.linear(x, w, "q_a"), w, "q_norm") if "q_a.w" in w else x
        queries = np.split(self.linear(query, w, "q"), self.heads, axis=1)
        compressed, position = np.split(self.linear(x, w, "kv_a"), [rank], axis=1)
        pairs = np.split(self.linear(self.norm(compressed, w, "kv_norm"), w, "kv_b"), self.heads, axis=1)
        mixed = []
        for each, pair in zip(queries, pairs, strict=True):
            whole = np.concatenate([each[:, :plain], self.rotated(each[:, plain:])], axis=1)
            key = np.concatenate([pair[:, :plain], self.rotated(position)], axis=1)
            mixed.append(self.head(whole, key, pair[:, plain:], SEQ))
        return np.concatenate(mixed, axis=1)

    def activated(self, x: np.ndarray) -> np.ndarray:
        if self.family == "opt":
            return np.maximum(x, 0.0)
        if self.plain or self.gemma:
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    def feed(self, x: np.ndarray, w: Weights, prefix: str = "") -> np.ndarray:
        up = self.linear(x, w, f"{prefix}up")
        if self.plain:
            return self.linear(self.activated(up), w, "down")
        return self.linear(self.activated(self.linear(x, w, f"{prefix}gate")) * up, w, f"{prefix}down")

    def experts(self, x: np.ndarray, w: Weights) -> np.ndarray:
        config, out = self.config, np.zeros_like(x)
        scores = x @ w["router.w"]
        if self.family == "deepseek_v3":
            scores = 1 / (1 + np.exp(-scores))
        else:
            scores = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        normalized = self.family in ("mixtral", "deepseek_v3") or config.get("norm_topk_prob", False)
        scale = config.get("routed_scaling_factor", 2.5 if self.family == "deepseek_v3" else 1.0)
        for token, row in enumerate(scores):
            if config.get("n_group", 1) > 1:  # among the experts of one of two groups: the better pair
                groups = row.reshape(2, 2)
                row = np.where(groups.sum(1, keepdims=True) == groups.sum(1).max(), groups, 0.0).reshape(4)
            chosen = np.argsort(-row)[: config["num_experts_per_tok"]]
            for expert in chosen:
                gate = row[expert] / (row[chosen].sum() if normalized else 1.0) * scale
                own = {f"{n}.w": w[f"experts.{n}.w"][expert] for n in ("gate", "up", "down")}
                out[token] += gate * self.feed(x[token], own)
        if self.family == "qwen2_moe":
            return out + self.feed(x, w, "shared.") / (1 + np.exp(-x @ w["shared.score.w"]))
        return out + self.feed(x, w, "shared.") if config.get("n_shared_experts") else out

    def loss(self, tokens: np.ndarray, labels: np.ndarray) -> float:
        table = self.all[self.named("embed")]
        scale, branch = (self.config.get(f"{n}_multiplier", 1.0) for n in ("embedding", "residual"))
        x = table[tokens] * (np.sqrt(self.hidden) if self.gemma else scale)
        first = 2 if self.family == "opt" else 0
        x = x + self.all["wpe"][first : first + len(tokens)] if self.gpt else x
        for layer in range(self.layers):
            start = f"h{layer}."
            w = {n.removeprefix(start): a for n, a in self.all.items() if n.startswith(start)}
            after = self.family in ("gemma2", "gemma3_text", "glm4", "olmo2")
            normed = x if self.family == "olmo2" else self.norm(x, w, "norm1")
            mixed = self.latent(normed, w) if "kv_a.w" in w else self.grouped(normed, w, layer)
            mixed = self.linear(mixed, w, "o")
            before, x = x, x + branch * (self.norm(mixed, w, "norm1_out") if after else mixed)
            if f"{self.named('norm2')}.scale" in w:
                normed = self.norm(before if self.parallel else x, w, "norm2")
            elif self.family == "olmo2":
                normed = x
            made = self.experts(normed, w) if "router.w" in w else self.feed(normed, w)
            x = x + branch * (self.norm(made, w, "norm2_out") if after else made)
        x = self.norm(x, self.all, "norm")
        scale = self.config.get("logit_scale", 1.0) / self.config.get("logits_scaling", 1.0)
        logits = x @ self.all.get("head", table.T) * scale
        cap = self.config.get("final_logit_softcapping")
        logits = cap * np.tanh(logits / cap) if cap else logits
        chosen = logits[np.arange(len(labels)), labels]
        return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))
