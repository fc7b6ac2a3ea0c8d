"""Files of timings: tables, and what nccl-tests print; what is wrong with them is said."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import says
from timings_files import read

from distsim.calibration import files as limits
from distsim.calibration import read_timings
from distsim.calibration.timings import (
    AttentionShape,
    CollectiveCall,
    LaunchCall,
    attention,
    memory,
    product,
)
from distsim.errors import TimingsError

DATA = Path(__file__).parent / "data" / "calibration"


# --- tables -----------------------------------------------------------------------------------------------


def test_every_kind_of_row(tmp_path):
    text = """# a remark
op,seconds,m,n,k,dtype,batch,heads,kv_heads,seq,head_dim,causal,bytes,kernels,mode,ranks,nodes
product,1e-3,128,64,32,float16,,,,,,,,,,,
product,0.001,128,64,32,bfloat16,4

attention,2e-3,,,,,2,8,,512,64,true
attention_grad,3e-3,,,,float16,2,8,4,512,64,False
memory,4e-6,,,,,,,,,,,4096
launch,5e-3,,,,,,,,,,,,100
launch,5e-3,,,,,,,,,,,,100,compiled
all_reduce,6e-5,,,,,,,,,,,65536,,,8
shift,6e-5,,,,,,,,,,,65536,,,16,2
"""
    found = read(tmp_path, "t.CSV", text).timings
    assert [timing.call for timing in found] == [
        product(128, 64, 32, "float16"),
        product(128, 64, 32, "bfloat16", 4),
        attention(AttentionShape(2, 8, 8, 512, 64, True), "bfloat16"),
        attention(AttentionShape(2, 8, 4, 512, 64, False), "float16", backward=True),
        memory(4096),
        LaunchCall(100),
        LaunchCall(100, "compiled"),
        CollectiveCall("all_reduce", 65536, 8),
        CollectiveCall("shift", 65536, 16, 2),
    ]
    assert (found[0].seconds, found[0].file, found[0].place) == (1e-3, "t.CSV", "line 3")
    assert found[2].place == "line 6"
    kinds = [timing.call.kind for timing in found[:5]]
    assert kinds == ["linear", "batched", "attention", "attention_grad", "memory"]


def test_work_of_calls():
    assert product(128, 64, 32, "bfloat16").demand.flops == 2 * 128 * 64 * 32
    assert product(8, 8, 8, "float8e4m3fn").kind == "linear_float8"
    moved = memory(4096).demand
    assert moved.bytes_read + moved.bytes_written == 4096


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("product,1e-3,0,64,32,float16", ("line 2, column m", "'0' is no whole number from 1 to")),
        ("product,1e-3,1e3,64,32,float16", ("column m", "'1e3'")),
        ("product,1e-3,\u0661\u0662,64,32,float16", ("column m",)),
        ("product,1e-3,99999999999999999999,64,32,float16", ("column m",)),
        ("product,1e-3,128,64,,float16", ("column k", "it is empty; product needs m, n, k, dtype")),
        ("product,1e-3,128,64,32,fp16", ("line 2", "'fp16' is not one of float64")),
        ("product,-1,128,64,32,float16", ("column seconds", "no number of seconds")),
        ("product,nan,128,64,32,float16", ("column seconds", "no number of seconds")),
        ("product,0,128,64,32,float16", ("line 2", "0 s is no time of a kernel")),
        ("product,1e99,128,64,32,float16", ("line 2", "is no time of a kernel")),
        ("product,,128,64,32,float16", ("column seconds",)),
        ("prodct,1,128,64,32,float16", ("column op", "did you mean product?")),
        (",1,128,64,32,float16", ("column op",)),
        ("product,1,128,64,32,float16,,4", ("column ranks", "product has none")),
        ("product,1,128,64,32,float16,,,,,", ("11 cells in a table of 10 columns",)),
        ("attention,1,,,,,,,1,yes", ("line 2",)),
        ("all_reduce,1,,,,,1024,1", ("ranks=1", "2 to")),
        ("all_reduce,1,,,,,1024,3,2", ("nodes=2 does not divide ranks=3",)),
        ("send,1,,,,,1024,4", ("ranks=4", "a send has 2")),
        ("all_reduce,1,,,,,1024,9999", ("column ranks", "from 1 to 4096")),
    ],
)
def test_rows_that_are_wrong(tmp_path, row, said):
    head = "op,seconds,m,n,k,dtype,bytes,ranks,nodes,mode\n"
    with says(TimingsError, "t.csv", *said):
        read(tmp_path, "t.csv", head + row)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("launch,1,9,lazy,,,,,,", ("column mode", "'lazy' is not one of eager")),
        ("attention,1,,,2,7,4,512,64,true", ("kv_heads=4 does not divide heads=7",)),
        ("attention,1,,,2,8,4,512,64,1", ("column causal", "neither true nor false")),
    ],
)
def test_rows_of_other_kinds_that_are_wrong(tmp_path, row, said):
    with says(TimingsError, "t.csv, line 2", *said):
        read(tmp_path, "t.csv", "op,seconds,kernels,mode,batch,heads,kv_heads,seq,head_dim,causal\n" + row)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no timings"),
        ("op,seconds\n", "has no timings"),
        ("op,seconds,byte\n", "line 1: there is no column 'byte'; did you mean bytes?"),
        ("op,seconds,zzz\n", "there is no column 'zzz'; choose from op"),
        ("op,m\nproduct,1\n", "seconds among them"),
        ("op,seconds,m,M\n", "column m is named twice"),
        (b"op,seconds\n\xff\xfe", "is not text in UTF-8"),
        (b'op,seconds\nmemory,"1\x00', "t.csv"),
        ("op,seconds\nmemory," + "1" * 200_000, "field larger than field limit"),
    ],
)
def test_tables_that_are_none(tmp_path, content, said):
    with says(TimingsError, "t.csv", said):
        read(tmp_path, "t.csv", content)


def test_files_that_are_none(tmp_path, monkeypatch):
    with says(TimingsError, "none.csv is not a file"):
        read_timings([tmp_path / "none.csv"])
    with says(TimingsError, "is not a file"):
        read_timings([tmp_path])
    monkeypatch.setattr("distsim.calibration.torch_trace.MAX_TRACE_BYTES", 1 << 20)
    with says(TimingsError, "has more than 1 MiB"):
        read(tmp_path, "bomb.json.gz", gzip.compress(b" " * (1 << 24)))
    with says(TimingsError, "cannot be read", "Not a gzipped file"):
        read(tmp_path, "no.json.gz", b"{}")
    with says(TimingsError, "cannot be read"):
        read(tmp_path, "cut.json.gz", gzip.compress(b'{"traceEvents": []}' * 99)[:-12])
    monkeypatch.setattr("distsim.calibration.fitting.MAX_TIMINGS", 2)
    with says(TimingsError, "3 timings are more than 2"):
        read(tmp_path, "t.csv", "op,seconds,bytes\n" + "memory,1,8\n" * 3)
    assert limits.MAX_TRACE_BYTES < 1 << 30


# --- nccl-tests -------------------------------------------------------------------------------------------

# As nccl-tests 2.13 prints it (from memory), behind what srun --label puts before each line.
OLDER = """0: # nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
0: #
0: # Using devices
0: #   Rank  0 Pid  93200 on     host-a device  0 [0x0f] Tesla V100-SXM2-32GB
0: #   Rank  1 Pid  93200 on     host-a device  1 [0x15] Tesla V100-SXM2-32GB
0: #   Rank  2 Pid  93201 on     host-b device  0 [0x0f] Tesla V100-SXM2-32GB
0: #   Rank  3 Pid  93201 on     host-b device  1 [0x15] Tesla V100-SXM2-32GB
0: host-a:93200:93200 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
0: #
0: #                                             out-of-place                       in-place
0: #       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error
0: #        (B)    (elements)               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
0:            0             0     float     8.51    0.00    0.00    N/A     8.52    0.00    0.00    N/A
0:      1048576         65536     float    52.40   20.01   15.01  0e+00    52.11   20.12   15.09  0e+00
0:     67108864       4194304     float  2013.5   33.33   25.00  0e+00   2013.1   33.34   25.00    N/A
0: # Out of bounds values : 0 OK
0: # Avg bus bandwidth    : 11.6
"""


def test_what_nccl_tests_print(tmp_path):
    found = read_timings([DATA / "b200_efa_all_reduce_perf.txt"]).timings
    assert len(found) == 20
    assert found[0].call == CollectiveCall("all_reduce", 32768, 32, 4)
    assert (found[-1].seconds, found[-1].place) == (pytest.approx(0.087182), "line 62")
    found = read(tmp_path, "all_gather_perf.txt", OLDER).timings
    assert [timing.call for timing in found] == [
        CollectiveCall("all_gather", size, 4, 2) for size in (1048576, 67108864)
    ]
    assert [timing.seconds for timing in found] == pytest.approx([52.40e-6, 2013.5e-6])
    tagged = OLDER.replace("0: ", "[1,0]<stdout>: ").replace("# nThread", "# alltoall_perf nThread")
    assert read(tmp_path, "slurm.out", tagged).timings[0].call.kind == "all_to_all"
    blank = OLDER.replace("busbw  error     time", "busbw #wrong     time").replace(
        "type  ", "type   redop    root "
    )
    assert len(read(tmp_path, "reduce-scatter.log", blank).timings) == 2  # tests without a sum leave it blank


def test_one_file_of_several_runs(tmp_path):
    one = (DATA / "b200_all_reduce_perf.txt").read_text()
    four = (DATA / "b200_efa_all_reduce_perf.txt").read_text()
    found = read(tmp_path, "slurm.out", "+ srun ./build/all_reduce_perf -b 32K\n" + one + four).timings
    assert [timing.call.ranks for timing in found] == [8] * 20 + [32] * 20
    other = four.replace("starting: all_reduce_perf", "starting: alltoallv_perf")
    with says(TimingsError, "line 85", "nothing says which collective this is"):
        read(tmp_path, "all_reduce.out", one + other)


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("x.txt", "", "", ("line 14", "nothing says which collective this is")),
        ("all_reduce.txt", "", "", ("line 14", "busbw / algbw is 0.75, and 1.5 for all_reduce over 4 ranks")),
        ("all_gather.txt", "#   Rank  3", "# rank", ("line 14", "busbw / algbw")),
        ("all_gather.txt", "#   Rank", "# rank", ("line 13", "0 lines of ranks")),
        ("all_gather.txt", "Rank  3", "Rank  2", ("line 7", "rank 2 is listed twice", "MPI=1")),
        ("all_gather.txt", "Rank  3 ", "Rank  3 Group  1 ", ("line 7", "NCCL_TESTS_SPLIT")),
        ("all_gather.txt", " 2013.5 ", " abc ", ("line 15, column time", "'abc' is no number")),
        ("all_gather.txt", " 2013.5 ", " 2.0135 ", ("line 15", "in 2.014 us", "67108864", "in microseconds")),
        ("all_gather.txt", " 2013.5 ", " 0.0 ", ("line 15", "0 s is no time")),
        ("all_gather.txt", "4194304     float  2013.5   33.33   25.00", "4194304", ("line 15", "no row")),
        ("all_gather.txt", "67108864 ", "9" * 30 + " ", ("line 15", "no row")),
        ("all_gather.txt", "time   algbw", "busbw  algbw", ("line 11", "the columns are not")),
        ("all_gather.txt", "0:  ", "0: x", ("has no rows of nccl-tests",)),
        ("all_gather.txt", "host-b device  1", "host-c device  1", ("nodes=3 does not divide ranks=4",)),
    ],
)
def test_output_that_is_wrong(tmp_path, name, before, after, said):
    text = OLDER.replace(before, after) if before else OLDER
    if said[0] == "line 13":
        said = ("line 14", *said[1:])
    with says(TimingsError, name, *said):
        read(tmp_path, name, text)


@given(st.sampled_from(["t.csv", "t.json", "all_reduce.txt"]), st.text(max_size=60))
def test_odd_text_is_refused(tmp_path_factory, name, text):
    with pytest.raises(TimingsError, match=name):
        read(tmp_path_factory.mktemp("odd"), name, text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("my_allgather.txt", "all_gather"),
        ("b200-all-gather-2n.log", "all_gather"),
        ("nccl_reduce_scatter_perf", "reduce_scatter"),
        ("gather_perf.txt", "gather"),
        ("alltoall.txt", "all_to_all"),
        ("gathered.txt", None),
        ("alltoallv_perf.txt", None),
        ("reduce_perf.txt", None),
    ],
)
def test_names_that_say_which_collective(tmp_path, name, kind):
    if kind is None:
        with says(TimingsError, "nothing says which collective this is"):
            read(tmp_path, name, OLDER)
    else:
        assert read(tmp_path, name, OLDER).timings[0].call.kind == kind
