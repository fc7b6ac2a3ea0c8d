"""Rows of a table of measurements, as published ones are written: a stack of Megatron, one of torchtitan."""

GPT = {
    **{"id": "a", "table": "made_up", "source": "nobody", "notes": "", "framework": "Megatron-LM fork"},
    **{"hw_gpu": "A100-SXM4-80GB", "arch": "gpt", "n_layers": "6", "hidden": "64", "heads": "4"},
    **{"kv_heads": "4", "ffn": "256", "vocab": "", "seq": "32", "tied_emb": "no", "moe_experts": ""},
    **{"precision": "fp16", "attention": "", "dp": "1", "tp": "1", "sp": "no", "pp": "4", "vpp": "1"},
    **{"cp": "1", "ep": "1", "zero": "0", "fsdp": "", "schedule": "1f1b", "recompute": "none"},
    **{"micro_batch": "2?", "global_batch": "16", "peak_mem_gb": "0.01", "mem_kind": "GB as printed"},
}
LLAMA = GPT | {
    **{"framework": "torchtitan", "hw_gpu": "H100-SXM5-80GB", "arch": "llama3", "kv_heads": "2"},
    **{"vocab": "512", "precision": "fp8 linears", "attention": "SDPA flash", "dp": "4", "pp": "1"},
    **{"zero": "3", "schedule": "none", "recompute": "full", "mem_kind": "GiB max reserved"},
}
