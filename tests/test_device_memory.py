"""Bytes on a device: what fits and what does not, as it did where people ran it."""

from dataclasses import replace
from functools import cache

import pytest
from precision_models import MODELS
from test_mixed_precision import KEPT, joint_of
from training_models import laid_out, mesh_of

import distsim
from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import Float32, Mesh, Role, Tensor
from distsim.plan import Plan
from distsim.plan.stacks import STACKS
from distsim.plan_search import PlanTrials, remedies
from distsim.report import summarize
from distsim.schedule import schedule
from distsim.simulation import Simulator
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, add_loss, differentiate, optimizer_named
from distsim.transforms.autodiff.precision import POLICIES
from distsim.transforms.kernels.policies import KERNELS

A100 = load_cluster("dgx-a100:8")
BATCH, SEQ = 64, 8192
LLAMA3_8B = 8_030_261_248
"""Parameters (configs/params.csv, Meta-Llama-3.1-8B)."""


@cache
def llama(stack):
    """The training step of Llama 3 8B as a stack trains it, one sequence of 8,192 tokens a GPU."""
    chosen = STACKS[stack]
    model = add_loss(load_model("llama3-8b", BATCH, f"seq={SEQ}"), "auto")
    optimizer = optimizer_named(chosen.optimizer)
    return differentiate(model, optimizer, (), POLICIES[chosen.precision], chosen.clip)


def program_of(stack, plan):
    return parallelize(llama(stack), plan, A100, kernels=KERNELS[STACKS[stack].kernels])


def test_llama3_8b_fits_where_it_ran():
    """torchtitan: 64 A100, FSDP, every second layer recomputed; parameters, moments and what is saved."""
    memory = program_memory(program_of("torchtitan", Plan(dp=64, remat="every_early:2", zero=3)))
    assert memory.missing == 0
    (use,) = memory.ranks
    kept = use.by_kind["parameters"] + use.by_kind["state"]
    assert kept == pytest.approx(12 * LLAMA3_8B / 64, rel=1e-3)  # 4 + 8 bytes, padded
    # Sixteen layers save everything, sixteen their input; of the loss logits in both types.
    tokens, hidden, ffn, vocab, size = SEQ, 4096, 14336, 128256, 2
    layer = tokens * (hidden * (12 + 4 / 4) + 8 * ffn) + 4 * 32 * tokens
    least = 16 * (layer + size * tokens * hidden) + 4 * tokens * vocab
    assert least < use.by_kind["activations"] < 1.1 * least


def test_without_sharding_its_states_alone_do_not_fit():
    """Plain data parallelism in mixed precision: 14 of the 18 bytes a parameter when backward begins."""
    memory = program_memory(program_of("megatron", Plan(dp=64)))
    (use,) = memory.ranks
    assert use.by_kind["parameters"] + use.by_kind["state"] == 14 * LLAMA3_8B
    assert A100.devices[0].usable < 14 * LLAMA3_8B and memory.missing > 0
    assert use.peak > 18 * LLAMA3_8B


def test_the_fullest_device_is_the_one_that_has_least_left(tmp_path):
    """Of two stages the first has more in use, and on 80 GB more left; one rule for all that is reported."""
    path = tmp_path / "mixed.toml"
    nodes = "".join([f'[[nodes]]\ncount = 1\nbase = "{base}"\n' for base in ("dgx-a100", "dgx-a100-40gb")])
    path.write_text(f'base = "dgx-a100"\n{nodes}')
    asked = {"batch": 32, "seq": 4096, "stack": "megatron"}
    step = distsim.simulate("llama2-7b:layers=16", str(path), "dp=4,tp=2,pp=2,microbatches=8", **asked)
    figures, uses = step.to_dict(), step.memory
    most = max(uses, key=lambda device: uses[device].peak)
    fullest = min(uses, key=lambda device: device.usable - uses[device].peak)
    assert most.memory > fullest.memory
    assert (figures["fullest_device"], figures["peak_bytes"]) == (str(fullest), uses[fullest].peak)
    assert figures["usable_bytes"] == fullest.usable
    assert f"on {fullest}, of" in summarize(step, 32) and f"on {fullest}, fits" in repr(step)


def test_what_would_make_it_fit_is_said():
    simulator = Simulator(CostModel(A100))
    trials = PlanTrials(
        llama("megatron"), A100, lambda plan: program_of("megatron", plan), simulator.simulate
    )
    found = remedies(Plan(dp=64), trials, most=1, seconds=600).fit
    assert [each.change for each in found] == ["zero=3"]
    assert found[0].peak <= A100.devices[0].usable


@pytest.mark.parametrize("policy", ["tf32", "amp"])
def test_bytes_a_parameter_in_the_simulated_memory(policy):
    """As test_mixed_precision has them of the other policies."""
    assert kept_of(policy) == KEPT[policy]


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_float32_copies_of_gradients_lie_beside_their_sums(loss_scale):
    """Of the 20 bytes of Megatron-LM in fp16, 4 are copies that its optimizer takes when backward is over.

    With a scale, squares are summed over them before the update, in a block of its own.
    """
    policy = replace(POLICIES["mixed_fp16"], loss_scale=loss_scale)
    joint = differentiate(MODELS["gpt"](), Adam(), precision=policy)
    program = laid_out(joint, mesh_of(1, 1, 1), schedule("1f1b", 1, 4))
    (memory,) = program_memory(program).ranks
    size = sum(v.type.size for v in joint.inputs if v.role is Role.PARAMETER)
    assert memory.at[0].name == "U@0"
    assert memory.peak == pytest.approx(KEPT["mixed_fp16"] * size, rel=1e-2)
    assert memory.peak > KEPT["mixed_fp16"] * size
    (written,) = peak_memory(program.to_function(steady=True)).values()
    assert written.peak == memory.peak


def test_a_tensor_takes_whole_blocks_and_tensors_whole_segments():
    """PyTorch's allocator: blocks of 512 bytes in segments of 2 MiB."""
    device = A100.devices[0]
    assert (device.block, device.segment) == (512, 2**21)
    given = (device.memory - device.context) / (1 + device.fragmentation)
    assert device.usable % 2**21 == 0 and 0 <= given - device.usable < 2**21
    for shape, nbytes, allocated in (((), 4, 512), ((128,), 512, 512), ((43, 3), 516, 1024), ((0,), 0, 0)):
        assert Tensor(Float32(), shape, device).nbytes == nbytes == Tensor(Float32(), shape).allocated
        assert Tensor(Float32(), shape, Mesh([device], dp=1)).allocated == allocated
    joint = joint_of("gpt", "mixed")
    peaks = []
    for placed in (device, replace(device, block=1)):
        program = laid_out(joint, Mesh([placed], pp=1, dp=1, tp=1), schedule("1f1b", 1, 2))
        (memory,) = program_memory(program).ranks
        (written,) = peak_memory(program.to_function(steady=True)).values()
        assert written.peak == memory.peak
        peaks.append(memory.peak)
    assert peaks[0] % 512 == 0 and peaks[0] > peaks[1]


def kept_of(policy):
    """Bytes a parameter at the peak of a step of many microbatches, but for the sum of the losses."""
    joint = joint_of("gpt", policy)
    (memory,) = program_memory(laid_out(joint, mesh_of(1, 1, 1), schedule("1f1b", 1, 4))).ranks
    size = sum(v.type.size for v in joint.inputs if v.role is Role.PARAMETER)
    kept = sum(memory.by_kind.get(kind, 0) for kind in ("parameters", "state", "gradients"))
    return (kept - joint.outputs[0].type.nbytes) / size
