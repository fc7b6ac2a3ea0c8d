"""Bytes that devices send in a step, by what they are: closed forms, and every op of the step written out."""

from collections import Counter

import pytest

import distsim
from distsim.cost.demand import collective_of, copied_bytes
from distsim.errors import SimulationError
from distsim.hardware import collective_transfer, load_cluster
from distsim.ir import all_ops
from distsim.models import mlp
from distsim.ops import operator, signature_of
from distsim.simulation import bytes_sent
from distsim.simulation.explain.bytes_sent import ACTIVATION, GRADIENT, ONCE
from distsim.simulation.tasks.rank_classes import exchanges

WIDTH, LAYERS, BATCH = 64, 4, 16
PARAMETERS = LAYERS * WIDTH * WIDTH * 4
MLP = f"mlp:layers={LAYERS},width={WIDTH}"
GPT = "gpt:layers=4,hidden=64,heads=4,seq=32,vocab=128"
MOE = "mixtral-8x7b:layers=2,hidden=64,heads=4,kv_heads=4,vocab=128"


def simulated(plan, model=MLP, cluster="dgx-a100", batch=BATCH, **options):
    return distsim.simulate(model, cluster, plan, batch, kernels="ops", **options)


def sent(plan):
    step = simulated(plan)
    return list(bytes_sent(step.simulated, step.cost_model.topology).values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_messages_are_microbatches_times_an_activation_each_way(schedule):
    each = 4 * (BATCH // 4) * WIDTH * 4
    first, last = sent(f"pp=2,microbatches=4,schedule={schedule}")
    assert (first, last) == ({ACTIVATION: each}, {GRADIENT: each})


def test_chunks_send_as_often_as_the_model_is_cut():
    """Four stages on two ranks: the middle boundary of three is from the last to the first."""
    each = BATCH * WIDTH * 4
    first, last = sent("pp=2,microbatches=4,schedule=interleaved,chunks=2")
    assert (first[ACTIVATION], first[GRADIENT]) == (2 * each, each)
    assert (last[ACTIVATION], last[GRADIENT]) == (each, 2 * each)


def test_a_tied_embedding_goes_once_each_way():
    """The gradient to the stage that updates it, the new value back: vocabulary x width of float32."""
    step = simulated("pp=2,microbatches=4", "gpt2:layers=2,hidden=64,heads=4,vocab=128", seq=32)
    first, last = bytes_sent(step.simulated, step.cost_model.topology).values()
    assert first == {ACTIVATION: BATCH * 32 * 64 * 4, ONCE: 128 * 64 * 4}
    assert last == {GRADIENT: BATCH * 32 * 64 * 4, ONCE: 128 * 64 * 4}


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_replicas_reduce_the_gradients_of_their_parameters_around_a_ring(dp):
    """2 (n - 1) / n of the tensor from each rank; types lie on two replicas whatever dp is."""
    for each in sent(f"dp={dp}"):
        reduced = sum(nbytes for what, nbytes in each.items() if what.endswith("backward"))
        assert reduced == pytest.approx(2 * (dp - 1) / dp * PARAMETERS)
        assert sum(each.values()) - reduced <= 2 * 4  # of the loss


def test_divided_state_is_scattered_once_and_gathered_once():
    for each in sent("dp=8,zero=1"):
        assert each["reduce_scatter over dp, backward"] == pytest.approx(7 / 8 * PARAMETERS)
        assert each["all_gather over dp, update"] == pytest.approx(7 / 8 * PARAMETERS)


@pytest.mark.parametrize(
    "plan", ["offload=4", "dp=2,offload=3", "tp=2,pp=2,microbatches=4,schedule=gpipe,stages=layers,offload=2"]
)
def test_copies_to_the_host_are_what_it_holds_and_come_back(plan):
    """Of steps in which all is there before any comes back; the copies of an op are what its link moves."""
    step = simulated(plan, GPT)
    found = bytes_sent(step.simulated, step.cost_model.topology)
    assert {device: own["offload"] for device, own in found.items()} == dict(step.host_memory)
    assert all(own["offload"] == own["fetch"] > 0 for own in found.values())
    device = next(iter(found))
    link = device.host_link
    for op in all_ops(step.simulated.to_function()):
        nbytes = copied_bytes(signature_of(op))
        assert (nbytes > 0) == (op.op_type in ("Offload", "Fetch"))
        if nbytes:
            seconds = step.cost_model.seconds(signature_of(op), (device,))
            assert seconds == pytest.approx(link.latency + nbytes / link.achieved)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize(("reshard", "kept"), [("always", 0), ("auto", 1)])
def test_divided_weights_are_gathered_for_each_pass(precision, reshard, kept):
    """Also those of which backward reads the copies that autocast saved, in the type in which they are held.

    Biases and embeddings are gathered for forward alone, the last unit (norm and head) once where it is kept.
    """
    step = simulated(f"dp=8,zero=3,reshard={reshard}", GPT, batch=8, precision=precision)
    weights, biases = 12 * 64 * 64 + 2 * 64, 11 * 64  # Narayanan et al. 2021, appendix: 12 h^2 + 13 h a layer
    head, ends = 128 * 64 + 64, (128 + 32 + 1) * 64  # with the norm's scale; embeddings, the norm's bias
    forward, backward = 4 * (weights + biases) + head + ends, 4 * weights + (0 if kept else head)
    for each in bytes_sent(step.simulated, step.cost_model.topology).values():
        assert each["all_gather over dp, forward"] == pytest.approx(7 / 8 * 4 * forward)
        assert each["all_gather over dp, backward"] == pytest.approx(7 / 8 * 4 * backward)


@pytest.mark.parametrize("stages", ["even", "1-2-1"])
def test_stages_that_divide_layers_gather_as_much_for_backward(stages):
    """Under autocast as in float32, so that neither cut seems cheaper than it is."""
    plan = f"dp=8,pp=3,microbatches=3,zero=3,reshard=always,stages={stages}"
    found = [
        sum(
            nbytes
            for each in bytes_sent(step.simulated, step.cost_model.topology).values()
            for what, nbytes in each.items()
            if what == "all_gather over dp, backward"
        )
        for step in [simulated(plan, GPT, "dgx-a100:3", 24, precision=each) for each in ("fp32", "amp")]
    ]
    assert found[1] == pytest.approx(found[0]) and found[0] > 0


@pytest.mark.parametrize(
    ("model", "cluster", "plan"),
    [
        (GPT, "dgx-a100", "dp=8,zero=3"),
        (GPT, "dgx-a100", "dp=8,zero=3,zero_ranks=4"),
        (GPT, "dgx-a100:2", "dp=2,tp=4,pp=2,microbatches=4"),
        (GPT, "dgx-a100", "tp=4,dp=2,sp=on"),
        (GPT, "dgx-a100:2", "dp=16,zero=1"),
        (GPT, "dgx-a100", "cp=4,dp=2,cp_kind=ring"),
        (MLP, "dgx-a100", "pp=2,microbatches=4,schedule=dualpipe,dp=2"),
        (MOE, "dgx-a100", "dp=8,ep=4"),
    ],
)
def test_each_device_sends_what_the_ops_of_the_step_written_out_send(model, cluster, plan):
    """Of the very ranks, device by device, where the table has a pattern that stands for them."""
    seq = 32 if model == MOE else None
    step = simulated(plan, model, cluster, 64, seq=seq, attention="flash" if model == GPT else None)
    topology, expected = step.cost_model.topology, Counter()
    for op in all_ops(step.simulated.to_function(steady=True)):
        for each in exchanges(op) if operator(op.op_type).moves else ():
            kind, nbytes = collective_of(signature_of(op), each.group)
            for (source, _), size in collective_transfer(kind, nbytes, each.group, topology).hops:
                expected[source] += size
    found = bytes_sent(step.simulated, topology)
    assert {device: sum(own.values()) for device, own in found.items()} == pytest.approx(dict(expected))
    assert len(expected) == len(step.simulated.mesh.devices)


def test_a_function_is_refused():
    with pytest.raises(SimulationError, match="simulate a Program"):
        bytes_sent(mlp(layers=2, width=8, batch=4), load_cluster("dgx-a100"))
