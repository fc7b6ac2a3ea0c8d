"""Offload of saved activations: closed forms of time and memory, computed equality, engines, refusals."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from training_models import assert_same_step, mesh_of, random_inputs, small_gpt, small_llama, small_mlp

from distsim.compose import parallelize
from distsim.errors import CostError, PlanError, TypeRuleError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware import load_cluster, presets
from distsim.ir import Device, Float, Function, FunctionMaker, Link, Op, Tensor, Topology, all_ops
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.plan import Plan
from distsim.report import plot_timeline, summarize, write_trace
from distsim.simulation.memory.host import host_memory, program_host_memory
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.memory.timeline import memory_timeline
from distsim.transforms import SGD, differentiate, inline
from distsim.transforms.kernels.policies import KERNELS

LAYERS = 6
CLUSTER = load_cluster("dgx-a100")
MODELS = {
    "gpt": lambda: small_gpt(layers=LAYERS),
    "llama": lambda: small_llama(layers=8),
    "wide": lambda: decoder(DecoderSizes(LAYERS, 32, 8, GroupedHeads(4), FeedForward(64)), 8, 16, Float()),
}


@cache
def case(name: str):
    joint = differentiate(MODELS[name](), SGD(lr=0.1))
    inputs = random_inputs(joint, 0)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


def copies(function: Function, op_type: str) -> list[Op]:
    return [op for op in all_ops(function) if op.op_type == op_type]


def host_bytes(op: Op) -> int:
    return sum(value.type.host_nbytes for value in op.outputs)


def blocks(nbytes: int) -> int:
    """What the allocator gives a tensor of so many bytes: whole blocks of 512."""
    return -(-nbytes // 512) * 512


def device(copy: float = 1.0, **figures: float) -> Topology:
    """One device whose link to the host moves so many bytes a second."""
    gpu = Device(0, "gpu", kernel_launch_overhead=0.0, host_link=Link(copy), **figures)
    return Topology.hierarchical(gpu, 1, [])


def step_time(name: str, plan: str, topology: Topology) -> float:
    program = parallelize(case(name)[0], Plan.parse(plan), topology)
    return Simulator(CostModel(topology)).simulate(program).step_time


def layer_seconds(name: str, topology: Topology) -> tuple[float, float, int]:
    """How long forward and backward of a layer run, and the bytes that it saves."""
    program = parallelize(case(name)[0], Plan(offload=LAYERS - 1), topology)
    costs = CostModel(topology).on(topology.devices[0])
    ahead, behind = (call.callee.ops for call in program.to_function(steady=True).ops[:2])
    calls, back = ([costs.seconds(op) for op in ops if op.is_call] for ops in (ahead, behind))
    (saved,) = {host_bytes(op) for op in copies(program.to_function(), "Offload")}
    assert len(set(calls)) == len(set(back)) == 1
    return calls[0], back[0], saved


# --- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.9, 1.5, 2.5, 8.0])
def test_a_copy_is_hidden_behind_the_layer_that_follows_or_is_waited_for(share: float) -> None:
    """With C seconds a copy, F and B a layer: (L - 1) (max(C - F, 0) + max(C - B, 0)) more than without."""
    forward, backward, saved = layer_seconds("wide", device())
    copy = share * forward
    topology = device(saved / copy)
    more = step_time("wide", f"offload={LAYERS - 1}", topology) - step_time("wide", "dp=1", topology)
    late = max(copy - forward, 0.0) + max(copy - backward, 0.0)
    assert more == pytest.approx((LAYERS - 1) * late, abs=1e-3 * forward, rel=1e-6)


def test_the_last_layer_has_nothing_to_hide_behind() -> None:
    """Its copy is exposed after forward, and back before backward."""
    forward, _, saved = layer_seconds("wide", device())
    topology = device(saved / (0.5 * forward))
    more = step_time("wide", f"offload={LAYERS}", topology) - step_time("wide", "dp=1", topology)
    assert more == pytest.approx(2 * 0.5 * forward, rel=1e-3)


def test_a_copy_costs_what_its_bytes_take_on_the_link() -> None:
    x = Tensor(Float(), (1000,), Device(0, "gpu", host_link=Link(1e9, 1e-6, 0.5)))
    maker = FunctionMaker("f")
    there = maker.add("Offload", [maker.add_input_value("x", x), maker.add_input_value("y", x)])
    back = maker.add("Fetch", there)
    maker.set_outputs(back)
    topology = Topology.hierarchical(x.device, 1, [])
    found = Simulator(CostModel(topology)).interpret(maker.finalize(), maker.finalize().inputs)
    assert found.step_time == pytest.approx(2 * (1e-6 + 8000 / 0.5e9))
    assert {span.stream.name for span in found.spans() if span.end > span.start} == {"offload", "fetch"}
    assert found.shares(x.device).exposed_communication == found.step_time
    assert (there[0].type.nbytes, there[0].type.host_nbytes) == (0, 4000)
    assert host_memory(found.function) == {x.device: 8000} == found.host_memory


@pytest.mark.parametrize("engine", ["maxplus", "events"])
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_back_begins_where_it_stands(late: bool, engine: str) -> None:
    """It waits for the computation that is listed before it, which it does not read, and for no other."""
    topology = device(4000.0, dram_bandwidth=1000.0)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (1000,), topology.devices[0]))
    there = maker.add("Offload", [x])
    back = () if late else maker.add("Fetch", there)
    y = maker.add("Exp", [x])
    maker.set_outputs([*(maker.add("Fetch", there) if late else back), *y])
    found = Simulator(CostModel(topology), engine=engine).interpret(maker.finalize(), maker.finalize().inputs)
    times = {span.op.op_type: (span.start, span.end) for span in found.spans()}
    copy = pytest.approx(1.0)
    assert times["Offload"] == (0, copy)
    assert times["Fetch"][0] == (times["Exp"][1] if late else copy) and times["Exp"][1] > 2
    assert found.step_time == max(times["Exp"][1], times["Fetch"][1])


# --- memory ----------------------------------------------------------------------------------------------


def test_two_layers_stay_on_the_device() -> None:
    """To the byte: 2 S in place of L S, where the first of all layers that are offloaded runs backward; there
    the gradients of two layers are not yet. Each tensor takes whole blocks there, its bytes on the host."""
    joint = case("wide")[0]
    programs = [parallelize(joint, Plan(offload=count), CLUSTER) for count in (0, LAYERS - 1)]
    offloads = copies(programs[1].to_function(), "Offload")
    (there,) = {host_bytes(op) for op in offloads}
    (saved,) = {sum(blocks(value.type.nbytes) for value in op.inputs) for op in offloads}
    plain, held = (program_memory(program).ranks[0] for program in programs)
    weights = sum(blocks(value.type.nbytes) for value in joint.parameters if value.name.startswith("h0."))
    loss = blocks(4)
    assert plain.by_kind["activations"] == LAYERS * saved + loss
    assert held.by_kind["activations"] == loss
    assert held.by_kind["workspace"] - plain.by_kind["workspace"] == 2 * saved  # what is fetched
    assert plain.peak - held.peak == (LAYERS - 2) * (saved - weights)
    assert [*program_host_memory(programs[1]).values()] == [(LAYERS - 1) * there]
    assert [*program_host_memory(programs[0]).values()] == [0]


def test_a_layer_that_runs_again_offloads_its_input_alone() -> None:
    program = parallelize(case("wide")[0], Plan(remat="full", offload=LAYERS - 1), CLUSTER)
    offloads = copies(program.to_function(), "Offload")
    assert [host_bytes(op) for op in offloads] == [8 * 16 * 32 * 4] * (LAYERS - 1)


def test_the_host_holds_the_microbatches_that_are_in_flight() -> None:
    program = parallelize(case("gpt")[0], Plan.parse("pp=3,microbatches=4,stages=layers,offload=1"), CLUSTER)
    (each,) = {host_bytes(op) for op in copies(program.to_function(), "Offload")}
    assert list(program_host_memory(program).values()) == [3 * each, 2 * each, each]
    assert program_host_memory(program) == host_memory(program.to_function(steady=True))
    text = summarize(Simulator(CostModel(CLUSTER)).simulate(program))
    assert "host memory   the most is " in text


def test_over_time_no_more_is_in_use_than_in_the_order_of_calls() -> None:
    joint = case("wide")[0]
    program = parallelize(joint, Plan(offload=LAYERS - 1), CLUSTER)
    (line,) = memory_timeline(Simulator(CostModel(CLUSTER)).simulate(program))
    assert line.peak <= program_memory(program).peaks[0]


@pytest.mark.parametrize("copy", [1e5, 1e8])
@pytest.mark.parametrize(
    "text",
    [
        "microbatches=4,schedule=gpipe,stages=layers,offload=3,remat=block:2",
        "microbatches=4,schedule=zb_h1,stages=layers,offload=4",
        "microbatches=4,schedule=interleaved,chunks=2,stages=layers,offload=2",
    ],
)
def test_however_slow_copies_are_no_more_is_in_use_over_time_but_a_message(text: str, copy: float) -> None:
    """Computation waits for what is copied, and copies back for computation: only messages run ahead."""
    devices = [replace(each, host_link=Link(copy)) for each in CLUSTER.devices]
    topology = Topology.of_devices(devices, CLUSTER.levels)
    program = parallelize(case("llama")[0], Plan.parse(f"pp=2,{text}"), topology)
    sent = [key.value.type.allocated for b in program.table().blocks if b.target >= 0 for key in b.reads]
    simulation = Simulator(CostModel(topology)).simulate(program)
    for line in memory_timeline(simulation):
        assert line.peak <= simulation.memory[line.devices[0]].peak + max(sent)


# --- it computes the same, and every engine sees the same -------------------------------------------------

PLANS = [
    ("gpt", "offload=6"),
    ("gpt", "tp=2,dp=2,offload=5"),
    ("gpt", "pp=2,dp=2,microbatches=4,stages=4-2,offload=3"),
    ("llama", "pp=2,microbatches=4,schedule=interleaved,chunks=2,stages=layers,offload=1"),
    ("llama", "pp=2,microbatches=4,schedule=zb_h1,stages=layers,offload=3"),
    ("llama", "pp=2,microbatches=4,schedule=dualpipe_v,chunks=2,stages=layers,offload=2"),
    ("llama", "pp=2,microbatches=4,schedule=gpipe,stages=layers,offload=3,remat=block:2"),
    ("llama", "pp=2,tp=2,microbatches=2,stages=layers,offload=3,remat=attention"),
    ("llama", "pp=2,microbatches=2,stages=default,offload=3,remat=min_cut"),
    ("llama", "dp=2,microbatches=2,zero=3,offload=7,remat=full"),
    ("llama", "dp=2,pp=2,microbatches=2,zero=3,reshard=never,stages=layers,offload=3,remat=every:2"),
]


@pytest.mark.parametrize(("name", "text"), PLANS, ids=str)
def test_the_same_step(name: str, text: str) -> None:
    """NumPy over every rank; max-plus, events and the step written out; memory of device and host."""
    joint, inputs, expected = case(name)
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan
    program = parallelize(joint, plan, CLUSTER)
    assert_same_step(joint, program, inputs, expected)
    flat = program.to_function(steady=True)
    written = Function(flat.name, flat.inputs, flat.ops, flat.outputs)
    fast, events = (
        Simulator(CostModel(CLUSTER), engine=engine).simulate(program) for engine in ("maxplus", "events")
    )
    one_by_one = Simulator(CostModel(CLUSTER)).interpret(written, written.inputs)
    assert fast.step_time == events.step_time == one_by_one.step_time
    peaks = peak_memory(flat)
    assert all(use.peak == peaks[on].peak for on, use in program_memory(program).devices.items())
    assert program_host_memory(program) == host_memory(flat)
    layers = min(plan.offload, 8) * plan.num_stages * plan.microbatches
    counts = {len(copies(flat, op_type)) for op_type in ("Offload", "Fetch")}
    assert counts == {layers if "4-2" not in text else (3 + 2) * plan.microbatches}
    plain = parallelize(joint, replace(plan, offload=0), CLUSTER)
    assert max(program_memory(program).peaks) <= max(program_memory(plain).peaks)


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_no_kernel_swallows_a_copy(kernels: str) -> None:
    joint, inputs, expected = case("llama")
    plan = Plan.parse("pp=2,microbatches=2,stages=layers,offload=2")
    program = parallelize(joint, plan, CLUSTER, kernels=KERNELS[kernels])
    assert_same_step(joint, program, inputs, expected)
    assert len(copies(program.to_function(), "Fetch")) == 8
    fast, events = (
        Simulator(CostModel(CLUSTER), engine=engine).simulate(program) for engine in ("maxplus", "events")
    )
    assert fast.step_time == events.step_time


def test_weights_that_are_gathered_stay() -> None:
    joint = case("llama")[0]
    program = parallelize(joint, Plan.parse("dp=2,zero=3,reshard=never,offload=8"), CLUSTER)
    plain = parallelize(joint, Plan.parse("dp=2,offload=8"), CLUSTER)
    one, other = (sum(map(host_bytes, copies(each.to_function(), "Offload"))) for each in (program, plain))
    assert one == other > 0


def test_a_picture_shows_the_copies(tmp_path) -> None:
    topology = device(1e9)
    program = parallelize(case("wide")[0], Plan(offload=3), topology)
    simulation = Simulator(CostModel(topology)).simulate(program)
    plot_timeline(simulation, tmp_path / "a.png", streams=True)
    assert (tmp_path / "a.png").stat().st_size > 1000
    slow = parallelize(case("wide")[0], Plan(offload=LAYERS), device(1e3))
    path = Simulator(CostModel(device(1e3))).simulate(slow).critical_path
    assert next(iter(path.by_kind)) in ("Offload", "Fetch")
    assert any(part.communicates for part in path.parts)


def test_a_trace_has_the_copies_and_nothing_where_they_only_wait(tmp_path) -> None:
    """Without launches by the host none is in it; of each copy there is one slice, a copy of memory."""
    topology = device(1e9)
    program = parallelize(case("wide")[0], Plan(offload=3), topology)
    write_trace(Simulator(CostModel(topology)).simulate(program), tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    slices = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert slices["gpu_memcpy"] == 2 * 3 and slices["kernel"] > 6 and "cuda_runtime" not in slices


# --- refusals ---------------------------------------------------------------------------------------------


def test_what_cannot_be_offloaded_is_refused() -> None:
    joint = case("gpt")[0]

    def refused(text: str, match: str, topology: Topology = CLUSTER, function: Function = joint) -> None:
        with pytest.raises(PlanError, match=match):
            parallelize(function, Plan.parse(text), topology)

    refused("offload=-1", r"offload=-1 is out of range; choose one of 0\.\.")
    refused("offload=x", "offload='x' is not an integer; choose one of 0")
    refused("offload=2,remat=uniform:2", "with remat=uniform:2 only groups .* use remat=full")
    refused("offload=7", "has 6 blocks that repeat; use at most offload=6")
    refused("pp=2,stages=layers,offload=4", "6 blocks that repeat, at most 3 a stage; use at most offload=3")
    refused("pp=2,offload=1", "stages=even may begin within a layer.* use stages=layers")
    flat = differentiate(inline(small_mlp(layers=1)), SGD(lr=0.1))
    refused("offload=1", "has 0 blocks that repeat; use at most offload=0", function=flat)
    plain = Topology.hierarchical(Device(0, "gpu"), 1, [])
    refused("offload=1", r"gpu:0 has no host_link; give it one, as in Device.*Link", plain)


def test_copies_between_the_same_memories_are_refused() -> None:
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (2,), Device(0, "gpu")))
    with pytest.raises(TypeRuleError, match="Fetch: .* is not on the host already"):
        maker.add("Fetch", [x])
    (there,) = maker.add("Offload", [x])
    with pytest.raises(TypeRuleError, match="Offload: .* host is on the host already"):
        maker.add("Offload", [there])
    with pytest.raises(CostError, match=r"gpu:0 has no host_link"):
        Simulator(CostModel(topology := Topology.hierarchical(Device(0, "gpu"), 1, []))).interpret(
            maker.finalize(), maker.finalize().inputs
        )
    assert topology.devices[0].host_link is None


@pytest.mark.parametrize("name", presets())
def test_presets_know_the_link_to_the_host(name: str) -> None:
    link = load_cluster(name).devices[0].host_link
    assert link is not None
    c2c, infinity, *pcie = 225e9, 36e9, 15.75e9, 31.5e9, 63e9  # of 16 lanes, generations 3 to 5
    others = {"gb200-nvl72": [c2c], "gb300-nvl72": [c2c], "mi250x": [infinity]}
    rates = others.get(name, pcie)
    assert link.bandwidth in rates and 0.6 < link.efficiency < 0.9


def test_a_mesh_of_plain_devices_offloads_nothing() -> None:
    assert mesh_of(1, 1, 1).devices[0].host_link is None
