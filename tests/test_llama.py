"""The Llama builder: its size in closed form, and its meaning against a model written here head by head."""

import numpy as np
import pytest
from training_models import mesh_of, random_inputs, small_llama

from distsim.compose import parallelize
from distsim.executor import SequentialExecutor
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import Float64, Function, callees
from distsim.ir.type import BFloat16
from distsim.models import llama
from distsim.models.decoder import THETA
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate, shard

LLAMA3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
LLAMA3_405B = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256}
LLAMA2_7B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000}


def parameters(function: Function) -> int:
    return sum(value.type.size for value in function.parameters)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "published"),
    # What the published checkpoints hold: the sums of the sizes of their tensors.
    [(LLAMA3_8B, 8_030_261_248), (LLAMA3_405B, 405_853_388_800), (LLAMA2_7B, 6_738_415_616)],
)
def test_the_number_of_parameters_is_that_of_the_published_models(sizes, published):
    assert parameters(llama(seq=16, batch=1, **sizes)) == published


def test_the_number_of_parameters_in_closed_form():
    h, f, v, heads, kv, n = 48, 40, 24, 6, 3, 5
    function = llama(n, h, heads, kv, f, 4, 2, v)
    layer = 2 * h + 2 * h * h + 2 * h * (h // heads * kv) + 3 * h * f
    assert parameters(function) == 2 * v * h + h + n * layer


def test_the_layers_are_calls_of_one_callee():
    assert [f.name for f in callees(small_llama(layers=7))] == ["layer"]


def test_the_command_line_knows_it():
    function = load_model("llama:layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,seq=4,vocab=16", batch=8)
    assert parameters(function) == parameters(small_llama())


# --- meaning --------------------------------------------------------------------------------------


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def rotate(head: np.ndarray) -> np.ndarray:
    """Turn the pair (i, i + half) at position p by p THETA^(-i / half), as a complex number."""
    seq, size = head.shape
    half = size // 2
    turns = np.exp(1j * np.outer(np.arange(seq), THETA ** (-np.arange(half) / half)))
    turned = (head[:, :half] + 1j * head[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=1)


def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention of one head, position by position."""
    rows = []
    for position in range(len(query)):
        scores = key[: position + 1] @ query[position] / np.sqrt(query.shape[1])
        weights = np.exp(scores - scores.max())
        rows.append(weights / weights.sum() @ value[: position + 1])
    return np.stack(rows)


def sequence_loss(
    weights: dict[str, np.ndarray], tokens: np.ndarray, labels: np.ndarray, layers: int, heads: int, kv: int
) -> float:
    """The mean loss of one sequence."""
    x = weights["embed"][tokens]
    for i in range(layers):
        w = {name.split(".", 1)[1]: array for name, array in weights.items() if name.startswith(f"h{i}.")}
        normed = rms(x, w["norm1.scale"])
        parts = {"q": heads, "k": kv, "v": kv}
        query, key, value = (np.split(normed @ w[f"{n}.w"], c, axis=1) for n, c in parts.items())
        mixed = [
            attend(rotate(query[h]), rotate(key[h * kv // heads]), value[h * kv // heads])
            for h in range(heads)
        ]
        x = x + np.concatenate(mixed, axis=1) @ w["o.w"]
        normed = rms(x, w["norm2.scale"])
        gate = normed @ w["gate.w"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up.w"])) @ w["down.w"]
    logits = rms(x, weights["norm.scale"]) @ weights["head"]
    chosen = logits[np.arange(len(labels)), labels]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4), (2, 2), (8, 2)])
def test_the_loss_is_that_of_a_transformer_written_head_by_head(heads, kv_heads):
    function = small_llama(layers=2, heads=heads, kv_heads=kv_heads, seq=6, batch=3)
    inputs = random_inputs(function)
    given = {value.name: array for value, array in zip(function.inputs, inputs, strict=True)}
    pairs = zip(given.pop("tokens"), given.pop("labels"), strict=True)
    expected = np.mean([sequence_loss(given, *pair, 2, heads, kv_heads) for pair in pairs])
    (loss,) = SequentialExecutor().compute(function, inputs)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)


def test_a_position_sees_distances_only():
    """Rotary positions: scores of a query and a key depend on how far they are apart."""
    query, key = np.random.default_rng(0).standard_normal((2, 8))
    table = rotate(np.tile(query, (6, 1))) @ rotate(np.tile(key, (6, 1))).T
    for distance in range(6):
        np.testing.assert_allclose(np.diag(table, distance), table[0, distance], rtol=1e-12)


def test_bfloat16_keeps_far_positions_apart():
    function = llama(1, 16, 2, 1, 8, 2048, 1, 16, dtype=BFloat16())
    angles = next(op for op in function.ops if op.op_type == "Mul")
    assert angles.outputs[0].type.dtype.np == np.float32
    assert {v.type.dtype for op in function.ops if op.is_call for v in op.inputs} == {BFloat16()}


# --- how it is divided ----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_divide_every_matrix_of_a_layer_with_two_all_reduces(tp):
    """Column, attention by groups, row; column, row: the pattern of Megatron-LM, with one pair per layer."""
    function = llama(2, 256, 8, 4, 512, 64, 2, 64, dtype=Float64())
    local = shard(function, mesh_of(tp=tp)).function
    layer = next(op.callee for op in local.ops if op.is_call)
    assert [op.op_type for op in layer.ops].count("MPIAllreduce") == 2
    shapes = {v.name: v.type.shape for v in layer.parameters}
    assert shapes["q.w"] == shapes["o.w"][::-1] == (256, 256 // tp)
    assert shapes["k.w"] == shapes["v.w"] == (256, 128 // tp)
    assert shapes["gate.w"] == shapes["up.w"] == shapes["down.w"][::-1] == (256, 512 // tp)


def test_the_tables_are_made_on_every_stage_and_not_sent():
    program = parallelize(
        differentiate(small_llama(layers=4), Adam()), Plan(1, 1, 4, 2), load_cluster("dgx-a100")
    )
    sent = [op.inputs[0].type.shape for op in program.to_function().ops if op.op_type == "Send"]
    assert set(sent) == {(4, 4, 16)}  # activations and their gradients [microbatch, seq, hidden]
