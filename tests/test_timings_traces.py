"""Timings from traces of torch's profiler; what is wrong with them is said."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import says
from timings_files import read

from distsim.calibration.timings import (
    AttentionShape,
    CollectiveCall,
    LaunchCall,
    attention,
    memory,
    product,
)
from distsim.errors import TimingsError


def event(cat: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur, "args": args}


def op(number: int, name: str, ts: float, dims, types, values=(), dur: float = 10.0, **more) -> dict:
    args = {"External id": number, "Input Dims": dims, "Input type": types, "Concrete Inputs": list(values)}
    return event("cpu_op", name, ts, dur, **args, **more)


def kernel(number: int, dur: float, **args) -> dict:
    return event("kernel", "some_kernel", 1e6, dur, **{"External id": number, "correlation": number, **args})


def trace(tmp_path, *events, name: str = "trace.json"):
    text = json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": list(events)})
    return read(tmp_path, name, gzip.compress(text.encode()) if name.endswith(".gz") else text)


HALF = "c10::BFloat16"
FLASH = "aten::_scaled_dot_product_flash_attention"


def test_products_of_a_trace(tmp_path):
    """The kernels of one op are one call, also those of ops that it calls; of equal calls, the median."""
    found = trace(
        tmp_path,
        {"ph": "M", "name": "process_name", "args": {"name": "python"}, "ts": 0, "pid": 7, "tid": "stream 7"},
        op(1, "aten::linear", 0, [[64, 32], [16, 32], [16]], [HALF] * 3, dur=100),
        op(2, "aten::addmm", 10, [[16], [64, 32], [32, 16], [], []], [HALF] * 3 + ["Scalar"] * 2, dur=50),
        op(3, "aten::inner", 20, [[]], [""], dur=10),
        kernel(2, 5.0),
        kernel(3, 2.0),
        *[
            e
            for i, dur in ((4, 8.0), (5, 9.0))
            for e in (op(i, "aten::addmm", 100 * i, [[16], [64, 32], [32, 16]], [HALF] * 3), kernel(i, dur))
        ],
        op(8, "aten::bmm", 1000, [[4, 8, 2], [4, 2, 16]], ["c10::Half"] * 2),
        event("cuda_runtime", "cudaLaunchKernel", 1001, 3, correlation=99, **{"External id": 8}),
        event("kernel", "gemm", 1e6, 3.0, correlation=99),
        kernel(12345, 1.0),
        name="t.pt.trace.json.gz",
    )
    seconds = {timing.call: timing.seconds for timing in found.timings}
    assert seconds == pytest.approx(
        {product(64, 16, 32, "bfloat16"): 8e-6, product(8, 16, 2, "float16", 4): 3e-6}
    )
    assert [timing.place for timing in found.timings] == ["3 calls", "1 call"]
    assert found.notes == []


def test_attention_of_a_trace(tmp_path):
    dims = [[2, 8, 512, 64], [2, 4, 512, 64], [2, 4, 512, 64]]
    sizes = AttentionShape(2, 8, 4, 512, 64, True)
    types = [HALF] * 3
    forward = ["", "", "", "0.", "True", "False", ""]
    backward = [""] * 11 + ["True"]
    inner = [[d[0], d[2], d[1], d[3]] for d in dims]
    found = trace(
        tmp_path,
        op(1, FLASH, 0, dims, types, forward, dur=50),
        op(2, "aten::_flash_attention_forward", 10, inner, types, [""] * 8 + ["True"]),
        kernel(2, 30.0),
        op(
            3,
            "aten::_scaled_dot_product_flash_attention_backward",
            100,
            [dims[0], *dims],
            [HALF] * 4,
            backward,
        ),
        kernel(3, 60.0),
        kernel(3, 10.0),
        op(4, "flash_attn::_flash_attn_forward", 200, inner, types, [""] * 5 + ["True"]),
        kernel(4, 40.0),
        op(5, "aten::_scaled_dot_product_efficient_attention", 300, dims, types, []),
        kernel(5, 40.0),
    )
    assert {timing.call: timing.seconds for timing in found.timings} == pytest.approx(
        {attention(sizes, "bfloat16"): 35e-6, attention(sizes, "bfloat16", True): 70e-6}
    )
    assert found.notes == [
        "trace.json: 1 x aten::_scaled_dot_product_efficient_attention: whether it is causal is not recorded "
        "(Concrete Inputs)"
    ]


def test_bytes_of_a_trace(tmp_path):
    found = trace(
        tmp_path,
        op(1, "aten::add", 0, [[64, 32], [64, 32], []], ["float", "float", "Scalar"]),
        kernel(1, 1.0),
        op(2, "aten::copy_", 100, [[64, 32], [64, 32], []], [HALF, "float", "Scalar"]),
        kernel(2, 2.0),
        op(5, "aten::mul", 150, [[64, 64], []], ["float", "long int"]),
        kernel(5, 3.0),
        op(3, "aten::mul", 200, [[64, 32], [32]], ["float", "float"]),
        kernel(3, 1.0),
        op(4, "aten::relu", 300, [[64, 32]], [HALF], **{"Input Strides": [[1, 64]]}),
        kernel(4, 1.0),
        op(6, "aten::copy_", 400, [[64, 32], [64, 32], []], ["float", HALF, "Scalar"]),
        kernel(6, 5.0),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 7.0, bytes=5000),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, 7.0, bytes=5000),
    )
    assert {timing.call: timing.seconds for timing in found.timings} == pytest.approx(
        {
            memory(3 * 64 * 32 * 4): 1e-6,
            memory(64 * 32 * 6): 2e-6,
            memory(64 * 64 * 8): 3e-6,
            memory(10000): 7e-6,
        }
    )
    assert len(found.notes) == 3 and "which multiprocessors convert" in found.notes[-1]


def test_collectives_of_a_trace(tmp_path):
    """Kernels of collectives wait for the last rank, so the fastest of equal ones counts."""

    def nccl(dur: float, name: str, elements_in: int, elements_out: int, ranks: str, **args) -> dict:
        size = {"In msg nelems": elements_in, "Out msg nelems": elements_out, "dtype": "BFloat16"}
        group = {
            "Collective name": name,
            "Group size": 4,
            "Process Group Ranks": ranks,
            "In split size": "[]",
        }
        return event("kernel", "ncclDevKernel_x", 0, dur, **size, **group, **args)

    found = trace(
        tmp_path,
        nccl(90.0, "allreduce", 1000, 1000, "[0, 1, 2, 3]"),
        nccl(30.0, "allreduce", 1000, 1000, "[0, 1, 2, 3]"),
        nccl(50.0, "_allgather_base", 250, 1000, "[0, 8, 16, 24]"),
        nccl(40.0, "_reduce_scatter_base", 1000, 250, ""),
        nccl(40.0, "allreduce", 1000, 1000, "[0, 1, ..., 3]"),
        nccl(40.0, "send", 1000, 1000, "[0, 1, 2, 3]"),
    )
    assert {timing.call: timing.seconds for timing in found.timings} == pytest.approx(
        {
            CollectiveCall("all_reduce", 2000, 4, None, (0, 1, 2, 3)): 30e-6,
            CollectiveCall("all_gather", 2000, 4, None, (0, 8, 16, 24)): 50e-6,
            CollectiveCall("reduce_scatter", 2000, 4, None): 40e-6,
        }
    )
    assert len(found.notes) == 2


def test_launches_of_a_trace(tmp_path):
    """What the host waits in between is not its time for a launch."""
    times, now = [], 0.0
    for i in range(200):
        times.append(event("cuda_runtime", "cudaLaunchKernel", now, 900.0 if i == 50 else 4.0))
        now += 1000.0 if i == 50 else 7.0 if i % 2 else 9.0
        if i == 100:
            times.append(event("cuda_runtime", "cudaDeviceSynchronize", now, 150.0))
            now += 160.0
        now += 5000.0 if i == 150 else 0.0
    (timing,) = trace(tmp_path, *times, kernel(1, 1.0)).timings
    assert timing.call == LaunchCall(196)
    assert timing.seconds / 196 == pytest.approx(8e-6, rel=0.01)
    compiled = event("kernel", "triton_poi_fused_add_0", 0, 1.0)
    assert trace(tmp_path, *times, compiled).timings[0].call.mode == "compiled"
    with says(TimingsError, "trace.json", "no kernel is one that is known"):
        trace(tmp_path, *times[:20], kernel(1, 1.0))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "is no trace of torch's profiler"),
        (b'{"traceEvents": 3}', "is no trace of torch's profiler"),
        (b'{"traceEvents": [{"ts": "now"}]}', "traceEvents[0].ts"),
        (b'{"traceEvents": [', "is no trace of torch's profiler"),
        (b"[" * 100_000, "is no trace of torch's profiler"),
        (b"\xff", "is no trace of torch's profiler"),
        (b'{"traceEvents": []}', "has no kernels of a GPU"),
        (
            b'{"traceEvents": [{"cat": "kernel", "name": "k", "args": {"External id": [1]}}]}',
            "event 0 (k), args: ",
        ),
        (b'{"traceEvents": [{"cat": "kernel", "name": "k", "args": 3}]}', "event 0 (k), args: "),
    ],
)
def test_traces_that_are_none(tmp_path, content, said):
    with says(TimingsError, "t.json", said):
        read(tmp_path, "t.json", content)


def test_shapes_that_were_not_recorded(tmp_path):
    bare = event("cpu_op", "aten::mm", 0, 1.0, **{"External id": 1})
    with says(TimingsError, "t.json", "aten::mm without shapes; profile with record_shapes=True"):
        trace(tmp_path, bare, kernel(1, 1.0), name="t.json")


ARGS = st.dictionaries(
    st.sampled_from(
        ["Input Dims", "Input type", "Concrete Inputs", "Input Strides", "dtype", "Collective name"]
    ),
    st.recursive(st.none() | st.integers() | st.text(max_size=4) | st.booleans(), st.lists, max_leaves=6),
)


@given(ARGS, st.sampled_from(["aten::mm", "aten::bmm", "aten::copy_", "aten::_flash_attention_forward"]))
def test_odd_arguments_are_refused_or_passed_over(tmp_path_factory, args, name):
    folder = tmp_path_factory.mktemp("odd")
    try:
        trace(folder, event("cpu_op", name, 0, 1.0, **{"External id": 1}, **args), kernel(1, 1.0))
    except TimingsError as error:
        assert "trace.json" in str(error)
