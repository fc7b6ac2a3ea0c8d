"""The DeepSeek builder: sizes and work in closed form, its meaning against attention head by head."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_llama import attend, parameters, rms, rotate
from training_models import F64, random_inputs

from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.importer import load_model
from distsim.ir import Function, Op
from distsim.models import deepseek, llama
from distsim.ops import signature_of, work

TABLE = Path(__file__).parent / "data" / "autopipe" / "table.json"
ROWS = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
SMALL = {"hidden": 16, "heads": 3, "kv_lora": 6, "nope": 5, "rope": 4, "value": 7, "seq": 6, "vocab": 16}


# --- sizes ----------------------------------------------------------------------------------------


def test_the_number_of_parameters_is_that_of_deepseek_v3():
    """671B as published (DeepSeek-AI 2025, section 4.2), without the multi-token prediction module.

    The checkpoint's own sum: 671,026,419,200, of which 58 x 256 are biases that balance the experts' loads.
    """
    function = deepseek(q_lora=1536, experts=256, seq=64, batch=1)
    assert parameters(function) == 671_026_419_200 - 58 * 256


@pytest.mark.parametrize("q_lora", [0, 8])
def test_the_number_of_parameters_in_closed_form(q_lora):
    function = deepseek(
        4, ffn=24, q_lora=q_lora, experts=5, top_k=2, expert_ffn=9, shared=2, dense=1, batch=1, **SMALL
    )
    h, heads, latent, query, both = 16, 3, 6, 5 + 4, 5 + 7
    queries = h * q_lora + q_lora + q_lora * heads * query if q_lora else h * heads * query
    attention = queries + h * (latent + 4) + latent + latent * heads * both + heads * 7 * h
    dense, experts = 3 * h * 24, h * 5 + 3 * h * 9 * (5 + 2)
    assert parameters(function) == 2 * 16 * h + h + 4 * (attention + 2 * h) + dense + 3 * experts


def matrix_flops(ops: tuple[Op, ...]) -> float:
    return sum(w.flops for w in (work(signature_of(op)) for op in ops if not op.is_call) if w and w.matrix)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['family']}-{row['dim']}-{row['layers']}")
def test_the_work_of_a_layer_is_that_of_the_table(row):
    """Forward, per token: 2 flops for each weight of a product, and both products of attention in full.

    The causal half that is masked is counted, as by a profiler of the ops that run. Norms, rotations and
    softmax are not: they are no products.
    """
    common = {
        "layers": row["layers"],
        "hidden": row["dim"],
        "heads": 16,
        "ffn": row["ffn"],
        "seq": 2048,
        "vocab": 2048,
    }
    build = {
        "llama": lambda: llama(kv_heads=16, batch=1, **common),
        "dsv3": lambda: deepseek(batch=1, **common),
    }
    function = build[row["family"]]()
    layer = next(op.callee for op in function.ops if op.is_call)
    assert matrix_flops(layer.ops) == 2048 * row["fwd_flops_per_token_layer"]
    attention = tuple(op for op in layer.ops if op.outputs[0].name in ("scores", "mixed"))
    assert matrix_flops(attention) == 2048 * row["attn"]
    assert matrix_flops(function.ops) == 2048 * row["out_flops_per_token"]


# --- meaning --------------------------------------------------------------------------------------


def latent_attention(x: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """Multi-head latent attention of one sequence, head by head, with the sizes of SMALL."""
    query = rms(x @ w["q_a.w"], w["q_norm.scale"]) if "q_a.w" in w else x
    queries = np.split(query @ w["q.w"], heads, axis=1)
    latent, position = np.split(x @ w["kv_a.w"], [6], axis=1)
    pairs = np.split(rms(latent, w["kv_norm.scale"]) @ w["kv_b.w"], heads, axis=1)
    mixed = []
    for query, pair in zip(queries, pairs, strict=True):
        whole = np.concatenate([query[:, :5], rotate(query[:, 5:])], axis=1)
        key = np.concatenate([pair[:, :5], rotate(position)], axis=1)
        mixed.append(attend(whole, key, pair[:, 5:]))
    return np.concatenate(mixed, axis=1) @ w["o.w"]


def sequence_loss(
    weights: dict[str, np.ndarray], tokens: np.ndarray, labels: np.ndarray, layers: int
) -> float:
    x = weights["embed"][tokens]
    for i in range(layers):
        w = {name.split(".", 1)[1]: array for name, array in weights.items() if name.startswith(f"h{i}.")}
        x = x + latent_attention(rms(x, w["norm1.scale"]), w, SMALL["heads"])
        normed = rms(x, w["norm2.scale"])
        gate = normed @ w["gate.w"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up.w"])) @ w["down.w"]
    logits = rms(x, weights["norm.scale"]) @ weights["head"]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]))


@pytest.mark.parametrize("q_lora", [0, 8])
def test_the_loss_is_that_of_attention_written_head_by_head(q_lora):
    function = deepseek(2, ffn=10, q_lora=q_lora, batch=3, dtype=F64, **SMALL)
    inputs = random_inputs(function)
    given = {value.name: array for value, array in zip(function.inputs, inputs, strict=True)}
    pairs = zip(given.pop("tokens"), given.pop("labels"), strict=True)
    expected = np.mean([sequence_loss(given, *pair, 2) for pair in pairs])
    (loss,) = SequentialExecutor().compute(function, inputs)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)


# --- options --------------------------------------------------------------------------------------


def kinds(function: Function) -> list[str]:
    return [op.callee.name for op in function.ops if op.is_call]


def test_the_first_layers_are_dense_and_the_others_have_experts():
    options = {"layers": 4, "ffn": 8, "expert_ffn": 4, "top_k": 2, "batch": 1, **SMALL}
    assert kinds(deepseek(experts=4, dense=1, **options)) == ["dense_layer"] + ["expert_layer"] * 3
    assert kinds(deepseek(experts=4, dense=0, **options)) == ["expert_layer"] * 4
    assert kinds(deepseek(experts=4, dense=9, **options)) == kinds(deepseek(**options)) == ["dense_layer"] * 4


@pytest.mark.parametrize(("name", "value"), [("rope", 3), ("q_lora", -1), ("dense", -1), ("kv_lora", 0)])
def test_sizes_that_make_no_model_are_named(name, value):
    with pytest.raises(PlanError, match=f"{name}={value}"):
        deepseek(2, ffn=8, batch=1, **{**SMALL, name: value})


def test_the_command_line_knows_it():
    text = "layers=2,hidden=16,heads=3,kv_lora=6,nope=5,rope=4,value=7,seq=6,vocab=16,ffn=8"
    assert parameters(load_model(f"deepseek:{text}", batch=2)) == parameters(
        deepseek(2, ffn=8, batch=2, **SMALL)
    )
