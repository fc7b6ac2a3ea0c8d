"""Language models of torch whose training steps ``measure_steps.py`` times; needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EFFICIENT = "memory-efficient"
"""The kernel of attention that torch has for float32."""
BACKENDS = {
    "SDPA cuDNN": "CUDNN_ATTENTION",
    "SDPA flash2": "FLASH_ATTENTION",
    EFFICIENT: "EFFICIENT_ATTENTION",
}
"""What scaled_dot_product_attention is held to, as torch calls it, by what a row says."""


@dataclass(frozen=True)
class Step:
    """A training step: the sizes of a decoder, and how it is trained.

    ``precision``: ``amp bf16`` (parameters in float32), ``bf16 pure``, ``tf32`` or ``fp32``. ``recompute``:
    ``none`` or ``full``, of whole layers. ``sharded``: as torchtitan trains
    (:mod:`sharded_training`), its ``precision`` ``bf16``, ``fp8 rowwise`` or ``fp8 tensorwise``, its
    ``recompute`` also ``selective (per-op SAC)``.
    """

    name: str
    arch: str
    n_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    n_microbatches: int = 1
    precision: str = "amp bf16"
    recompute: str = "none"
    compiled: bool = False
    attention: str = "SDPA cuDNN"
    sharded: bool = False


def attention(torch: Any, step: Step, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Return attention over heads [batch, heads, seq, size], by a kernel of its own or written out."""
    functional = torch.nn.functional
    if step.attention == "math":
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        return functional.softmax(scores + mask, dim=-1) @ value
    grouped, kernels = step.kv_heads != step.heads, torch.nn.attention
    with kernels.sdpa_kernel(getattr(kernels.SDPBackend, BACKENDS[step.attention])):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def norm(torch: Any, step: Step) -> Any:
    """Return a normalization of a model: LayerNorm of a GPT, RMSNorm of a Llama."""
    if step.arch == "gpt":
        return torch.nn.LayerNorm(step.hidden)
    return torch.nn.RMSNorm(step.hidden, eps=1e-5)


def layer(torch: Any, step: Step) -> Any:
    """Return a layer: attention, and a feed-forward, gated in a Llama."""
    nn, functional = torch.nn, torch.nn.functional
    size, groups, gpt = step.hidden // step.heads, step.kv_heads, step.arch == "gpt"

    def turned(x: Any, *tables: Any) -> Any:
        if step.sharded:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * tables[0]).flatten(-2).type_as(x)
        cosines, sines = tables
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat((-second, first), dim=-1) * sines

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = norm(torch, step), norm(torch, step)
            self.query = nn.Linear(step.hidden, step.heads * size, bias=gpt)
            self.key = nn.Linear(step.hidden, groups * size, bias=gpt)
            self.value = nn.Linear(step.hidden, groups * size, bias=gpt)
            self.out = nn.Linear(step.heads * size, step.hidden, bias=gpt)
            self.up = nn.Linear(step.hidden, step.ffn, bias=gpt)
            self.gate = None if gpt else nn.Linear(step.hidden, step.ffn, bias=False)
            self.down = nn.Linear(step.ffn, step.hidden, bias=gpt)

        def forward(self, x: Any, tables: tuple[Any, ...]) -> Any:
            rows, seq, _ = x.shape
            inner = self.norm1(x)
            query, key, value = (
                each(inner).view(rows, seq, -1, size).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            if not gpt:
                query, key = turned(query, *tables[:-1]), turned(key, *tables[:-1])
            found = attention(torch, step, query, key, value, tables[-1])
            x = x + self.out(found.transpose(1, 2).reshape(rows, seq, -1))
            inner = self.norm2(x)
            if self.gate is None:
                return x + self.down(functional.gelu(self.up(inner)))
            return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))

    return Layer()


def decoder(torch: Any, step: Step) -> Any:
    """Return a decoder-only transformer: a GPT with learned positions and biases, its embedding tied to the
    head, or a Llama with RMSNorm, rotary embeddings, a gated feed-forward and a head of its own."""
    nn, functional, gpt = torch.nn, torch.nn.functional, step.arch == "gpt"

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(step.vocab, step.hidden)
            self.positions = nn.Embedding(step.seq, step.hidden) if gpt else None
            self.layers = nn.ModuleList([layer(torch, step) for _ in range(step.n_layers)])
            self.norm = norm(torch, step)
            self.head = nn.Linear(step.hidden, step.vocab, bias=False)
            self.loss = functional.cross_entropy
            if gpt:
                self.head.weight = self.tokens.weight
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: Any, labels: Any, tables: tuple[Any, ...]) -> Any:
            x = self.tokens(tokens)
            if self.positions is not None:
                x = x + self.positions.weight[: tokens.shape[1]]
            checkpoint = torch.utils.checkpoint.checkpoint
            for each in self.layers:
                again = step.recompute == "full" and not step.sharded
                x = checkpoint(each, x, tables, use_reentrant=False) if again else each(x, tables)
            logits = self.head(self.norm(x))
            return self.loss(logits.view(-1, step.vocab), labels.view(-1))

    return Decoder()


def tables_of(torch: Any, step: Step, device: str, dtype: Any) -> tuple[Any, ...]:
    """Return cosines and sines of rotary embeddings [seq, head size] of a Llama, of a sharded one both as
    complex numbers [seq, head size / 2], and the mask of a step whose attention is written out [seq, seq],
    else None."""
    mask, size = None, step.hidden // step.heads
    if step.attention == "math":
        mask = torch.full((step.seq, step.seq), float("-inf"), device=device, dtype=dtype).triu(1)
    if step.arch == "gpt":
        return (mask,)
    frequencies = 5e5 ** (-torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.outer(torch.arange(step.seq, device=device).float(), frequencies)
    if step.sharded:
        return torch.polar(torch.ones_like(angles), angles), mask
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype), mask
