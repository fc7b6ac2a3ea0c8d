"""The model of a row: the sizes of a decoder from its architecture and the numbers in its columns."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from distsim.errors import DistsimError
from distsim.importer.decoders import model_names, named_sizes
from distsim.models.decoder import count_parameters
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, DropoutRates, Positions
from distsim.models.mixture import Mixture
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.suggestions import did_you_mean
from distsim.truth.row import MissingFeatureError, Row, cell, decimal, number, plain

VOCAB = 50257
"""Of a GPT whose row gives none: GPT-2's, padded as Megatron-LM pads it."""

PADDED_TO = 128
"""Megatron-LM's --make-vocab-size-divisible-by, times tp."""

MEGATRON_DROPOUT = DropoutRates(0.1, 0.1, 0.1)
"""Defaults of --hidden-dropout and --attention-dropout (megatron/training/arguments.py)."""

NEOX_ROTARY = 0.25
"""rotary_pct of GPT-NeoX's configurations of its 20B and of Pythia (configs/20B.yml, configs/pythia)."""

ALMOST = 0.1
"""How far published numbers of parameters may be from those that sizes make: they are rounded."""

GPT = r"gpt|opt\b|bloom|mpt|turing|mt-?nlg|pythia|neox"
LLAMA = r"llama|mistral|internlm|\byi\b|vicuna|codellama|mixtral|qwen"
OTHERS = r"bert|\bt5\b|encoder|\bvit\b|mamba|\bssm\b|\brwkv\b|diffusion|\bdit\b|resnet|^mlp\b"


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a row that are those of a model; ``ffn`` 0 and ``experts`` 0 where there are none."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int
    top_k: int


def with_named_sizes(row: Row) -> Row:
    """Return a row with the sizes of the model that it names, in its own words, where it gives no layers.

    >>> with_named_sizes({"model": "llama3-8b", "framework": "torchtitan"})["kv_heads"]
    '8'
    """
    name = cell(row, "model")
    if cell(row, "n_layers") or not name:
        return row
    if name not in model_names():
        raise MissingFeatureError(
            f"a number in column n_layers, or a model by name: {name!r:.60} is none of `distsim models`"
            f"{did_you_mean(name, model_names())}"
        )
    sizes = named_sizes(name)
    heads, mixture = sizes.attention, sizes.experts
    known = {
        **{"n_layers": sizes.layers, "hidden": sizes.hidden, "vocab": sizes.vocab, "heads": heads.heads},
        **({"kv_heads": heads.kv_heads} if isinstance(heads, GroupedHeads) else {}),
        "ffn": sizes.feed_forward.ffn,
        **({} if mixture is None else {"moe_experts": mixture.experts, "moe_topk": mixture.top_k}),
    }
    return {**row, **{name: str(value) for name, value in known.items() if value and not cell(row, name)}}


def sizes_of(row: Row, megatron: bool, tp: int, assumed: list[str]) -> DecoderSizes:
    """Return the sizes of the model; in ``megatron`` the vocabulary is padded for tp ranks, dropout 0.1.

    Appends to ``assumed`` what no column says. Raises :class:`MissingFeatureError` for a model that cannot be
    built, and where a size is missing.
    """
    arch = plain(row, "arch")
    numbers = _numbers(row, megatron, tp, assumed)
    if re.search(OTHERS, arch):
        raise MissingFeatureError(f"the sizes of a {arch:.60} in the columns of a row")
    try:
        sizes = _sizes(row, arch, numbers, megatron, assumed)
        _compare_parameters(row, sizes, assumed)
        return sizes
    except DistsimError as error:
        if isinstance(error, MissingFeatureError):
            raise
        raise MissingFeatureError(f"a model that can be built: {error}") from None


def _sizes(row: Row, arch: str, numbers: _Numbers, megatron: bool, assumed: list[str]) -> DecoderSizes:
    if not numbers.experts and re.match(f"({GPT})", arch):
        return _gpt(row, arch, numbers, megatron, assumed)
    name = _name_of(row, arch, numbers)
    if name is None and re.match(f"({LLAMA})", arch) and "mla" not in arch:
        return _llama(row, arch, numbers)
    return _named(row, arch, numbers, name)


def _compare_parameters(row: Row, sizes: DecoderSizes, assumed: list[str]) -> None:
    """Say so where the sizes have another number of parameters than the row says."""
    said = decimal(row, "params_b")
    if said is not None:
        has = count_parameters(sizes).params / 1e9
        if abs(has / said - 1) > ALMOST:
            assumed.append(f"{has:.3g} billion parameters, as sizes make, not {said:g}")


def _numbers(row: Row, megatron: bool, tp: int, assumed: list[str]) -> _Numbers:
    heads, experts = number(row, "heads"), number(row, "moe_experts", 0)
    if not cell(row, "vocab"):
        assumed.append(f"vocabulary {VOCAB}")
    vocab = number(row, "vocab", VOCAB)
    if megatron:
        multiple = PADDED_TO * tp
        vocab = -(-vocab // multiple) * multiple
    return _Numbers(
        *(number(row, "n_layers"), number(row, "hidden"), heads, number(row, "kv_heads", heads)),
        *(number(row, "ffn", 0), vocab, experts if experts > 1 else 0, number(row, "moe_topk", 0)),
    )


def _gpt(row: Row, arch: str, numbers: _Numbers, megatron: bool, assumed: list[str]) -> DecoderSizes:
    bias = not re.search(r"\bno[- ]bias|without bias|bias-free", arch)
    tied = plain(row, "tied_emb") != "no"
    gated = re.search(r"swiglu|geglu|gated", arch)
    rotary = re.search(r"\brope\b|rotary|neox|pythia", arch)
    if not cell(row, "tied_emb"):
        assumed.append("tied embeddings")
    if not numbers.ffn:
        assumed.append("ffn 4 x hidden")
    # NemotronConfig of NeMo has no dropout, as reports of these models say (gpt/model/nemotron.py).
    drops = megatron and "nemotron" not in f"{arch} {plain(row, 'model')}"
    if drops:
        assumed.append("dropout 0.1")
    heads = GroupedHeads(numbers.heads, numbers.kv_heads, bias=bias, out_bias=bias)
    if rotary and re.search("neox|pythia", f"{arch} {plain(row, 'model')}"):
        assumed.append(f"rotary positions of {NEOX_ROTARY:g} of each head")
        heads = replace(heads, rotary_dims=int(heads.size(numbers.hidden) * NEOX_ROTARY))
    activation = "silu" if gated and "geglu" not in arch else "gelu"
    return DecoderSizes(
        numbers.layers,
        numbers.hidden,
        numbers.vocab,
        heads,
        FeedForward(numbers.ffn or None, activation, gated=bool(gated), bias=bias),
        norm=Norm("rms" if "rmsnorm" in arch else "layer"),
        positions=Positions(number(row, "seq"), learned=not rotary),
        dropout=MEGATRON_DROPOUT if drops else DropoutRates(),
        tied=tied,
        branches="parallel"
        if re.search(r"(?<!tensor[- ])(?<!context[- ])parallel[- ](att|resid|branch)", arch)
        else "sequential",
        names=GPT_NAMES,
    )


def _llama(row: Row, arch: str, numbers: _Numbers) -> DecoderSizes:
    """Return a Llama, or its like: a Mixtral, whose ``ffn`` is the width of an expert, a Qwen."""
    if not numbers.ffn:
        raise MissingFeatureError("a number in column ffn, not ''")
    experts = None
    if numbers.experts:
        experts = Mixture(numbers.experts, numbers.top_k or _missing("moe_topk"), numbers.ffn)
    return DecoderSizes(
        numbers.layers,
        numbers.hidden,
        numbers.vocab,
        GroupedHeads(
            numbers.heads, numbers.kv_heads, bias="qwen2" in arch, norm="head" if "qwen3" in arch else ""
        ),
        FeedForward(numbers.ffn),
        experts=experts,
        tied=plain(row, "tied_emb") == "yes",
    )


def _missing(column: str) -> int:
    raise MissingFeatureError(f"a number in column {column}, not ''")


def _name_of(row: Row, arch: str, numbers: _Numbers) -> str | None:
    """Return the name of the model in a row, if the library has it, in this width and as dense or as not."""
    written = [re.sub(r"[^a-z0-9.]", "", text) for text in (plain(row, "model"), arch)]
    for name in sorted(model_names(), key=len, reverse=True):
        if any(text.startswith(name.replace("-", "")) for text in written):
            sizes = named_sizes(name)
            if (sizes.hidden, sizes.experts is None) == (numbers.hidden, not numbers.experts):
                return name
    return None


def _named(row: Row, arch: str, numbers: _Numbers, name: str | None) -> DecoderSizes:
    """Return the sizes of a model of the library, with the numbers that the columns give."""
    if name is None:
        raise MissingFeatureError(
            f"the sizes of a {arch or 'model without arch':.60} in the columns of a row"
        )
    base = named_sizes(name)
    heads = base.attention
    if isinstance(heads, GroupedHeads):
        heads = replace(heads, heads=numbers.heads, kv_heads=numbers.kv_heads)
    elif heads.heads != numbers.heads:
        heads = replace(heads, heads=numbers.heads)
    experts, expert_layers = base.experts, base.expert_layers
    if experts is not None:
        experts = replace(experts, experts=numbers.experts, top_k=numbers.top_k or experts.top_k)
        dense = re.search(r"dense-layers ?= ?([0-9]{1,3})|\b([0-9]{1,3}) dense", arch)
        if dense:
            expert_layers = replace(expert_layers, dense=int(dense[1] or dense[2]))
    feed_forward = replace(base.feed_forward, ffn=numbers.ffn or base.feed_forward.ffn)
    return replace(
        base,
        layers=numbers.layers,
        vocab=numbers.vocab if cell(row, "vocab") else base.vocab,
        attention=heads,
        feed_forward=feed_forward,
        experts=experts,
        expert_layers=expert_layers,
        tied=plain(row, "tied_emb") == "yes" if cell(row, "tied_emb") else base.tied,
    )
