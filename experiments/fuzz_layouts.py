"""Random decoders in random layouts: every field of a plan together, on at most 16 ranks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
from fuzz_checks import MOST_DEVICES, PROGRAMMED, REMAT
from numpy.typing import NDArray

from distsim.errors import PlanError
from distsim.ir import Float64, Function
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import GPT_NAMES, DecoderSizes, Positions
from distsim.models.mixture import DISPATCHERS, Mixture
from distsim.models.parts.attention import GroupedHeads, Latent
from distsim.models.parts.feed_forward import FeedForward
from distsim.models.parts.layer_maker import Norm
from distsim.models.routing import Loads
from distsim.plan import Plan
from distsim.plan.rank_layout import ORDER
from distsim.schedule import SCHEDULES

BATCH, SEQ, VOCAB = 8, 8, 16


def invent_decoder(seed: int) -> Function:
    """Return a decoder of few layers: dense or of experts, grouped or latent heads, windows, tied or not."""
    rng = Random(f"decoder {seed}")
    layers = rng.choice((1, 2, 3, 4))
    if rng.random() < 0.2:
        attention = Latent(4, rng.choice((0, 4)), 4, 4, 2, 4)
    else:
        window = rng.choice((0, 0, 3))
        windowed = rng.choice(((True,), (True, False)))
        softcap = rng.choice((0.0, 0.0, 5.0))
        attention = GroupedHeads(4, rng.choice((4, 2, 1)), softcap=softcap, window=window, windowed=windowed)
    experts = Mixture(4, rng.choice((1, 2)), 8, rng.choice((0, 1))) if rng.random() < 0.25 else None
    own = Random(f"experts {seed}")  # recorded seeds stay what they were
    loads = Loads(own.choice((None, 0.5)), own.choice((None, 1.0)), seed)
    if experts is not None:
        experts, loads = with_choices(replace(experts, groups=own.choice((1, 1, 2, 4))), loads)
    plain = experts is None and isinstance(attention, GroupedHeads)
    learned = plain and rng.random() < 0.3
    sizes = DecoderSizes(
        layers,
        16,
        VOCAB,
        attention,
        FeedForward(None, "gelu", gated=False, bias=True) if learned else FeedForward(24),
        experts,
        norm=Norm("layer") if learned else Norm("rms"),
        positions=Positions(SEQ, learned=learned),
        tied=rng.random() < 0.3,
        **({"names": GPT_NAMES} if learned else {}),
    )
    attended = "flash" if rng.random() < 0.9 else "math"
    return decoder(sizes, BATCH, SEQ, Float64(), loads, attention=attended)


def with_choices(experts: Mixture, loads: Loads) -> tuple[Mixture, Loads]:
    """Return a mixture with a random loss and dispatcher, padded or not, by dice of their own."""
    rng = Random(f"mixture {experts} {loads}")
    if loads.capacity is not None:
        loads = replace(loads, pad=rng.choice((True, False)))
    experts = replace(experts, dispatcher=rng.choice(DISPATCHERS), aux_loss=rng.choice((0.0, 0.5)))
    return experts, loads


def distinct_tokens(seed: int) -> NDArray[np.int64]:
    """Return sequences of unlike tokens: rounding would say which of two equal ones an expert drops."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(VOCAB)[:SEQ] for _ in range(BATCH)])


def random_layout(seed: int, experts: bool) -> Plan:
    """Return a random plan of at most 16 devices that divides the batch, and experts if there are some."""
    rng = Random(f"layout {seed}")
    while True:
        dp, tp, cp = (rng.choice((1, 1, 2, 2, 4)) for _ in range(3))
        pp, microbatches = rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 2, 4))
        if dp * tp * cp * pp <= MOST_DEVICES and BATCH % (dp * microbatches) == 0:
            break
    schedule = rng.choice(("1f1b", "gpipe", rng.choice(PROGRAMMED)))
    order = ORDER.split("-")
    rng.shuffle(order)
    zero = rng.choice((0, 0, 1, 2, 3, 3))
    ep = rng.choice([n for n in (1, 2, 4) if dp % n == 0]) if experts else 1
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        cp_kind=rng.choice(("ring", "ulysses", "usp:2" if cp % 2 == 0 else "ring", "allgather"))
        if cp > 1
        else "allgather",
        order="-".join(order),
        ep=ep,
        microbatches=microbatches,
        schedule=schedule,
        chunks=SCHEDULES[schedule].stages_a_rank or rng.choice((1, 2)),
        remat=rng.choice(REMAT) if rng.random() < 0.5 else "none",
        zero=zero,
        reshard=rng.choice(("always", "never")) if zero == 3 else "always",
        sp="on" if tp > 1 and rng.random() < 0.5 else "off",
    )
    plan = with_copies(with_parts(with_tp_overlap(with_zero_ranks(with_buckets(plan)))))
    return with_experts(plan) if experts else plan


def with_tp_overlap(plan: Plan) -> Plan:
    """Return a plan whose products are split or not, by dice of their own."""
    split = plan.sp == "on" and Random(f"tp_overlap {plan}").random() < 0.5
    return replace(plan, tp_overlap="split") if split else plan


def with_parts(plan: Plan) -> Plan:
    """Return a plan that runs parts of layers again, or what it did, by dice of their own."""
    rng = Random(f"parts {plan}")
    parts = rng.sample(("norms", "activations", "attention"), rng.choice((1, 2, 3)))
    return replace(plan, remat=f"parts:{'+'.join(parts)}") if rng.random() < 0.1 else plan


def with_zero_ranks(plan: Plan) -> Plan:
    """Return a plan that divides over some ranks of dp or over all, by dice of their own."""
    rng = Random(f"zero_ranks {plan}")
    some = [n for n in range(2, plan.dp + 1) if plan.dp % n == 0] if plan.zero else []
    return replace(plan, zero_ranks=rng.choice((0, *some)))


def with_experts(plan: Plan) -> Plan:
    """Return a plan with experts over ranks of dp, cp and tp, by dice of their own."""
    found = [plan]
    for ep in (1, 2, 4):
        for etp in (0, 1, 2):
            with suppress(PlanError):
                found.append(replace(plan, ep=ep, etp=etp))
    return Random(f"experts over ranks {plan}").choice(found)


def with_copies(plan: Plan) -> Plan:
    """Return a plan that gathers parameters with FSDP2's copies, or without; the last dice of all."""
    copies = plan.zero == 3 and Random(f"copies {plan}").choice((True, False))
    return replace(plan, bucket="fsdp2") if copies else plan


def with_buckets(plan: Plan) -> Plan:
    """Return a plan with random buckets, by dice of their own: recorded seeds stay the same otherwise."""
    rng = Random(f"buckets {plan}")
    return replace(
        plan,
        bucket="auto" if plan.zero == 3 else rng.choice(("auto", "1B", "400B", "100p", "megatron")),
        overlap_grads=rng.choice(("on", "on", "off")),
        overlap_params=rng.choice(("on", "off")) if plan.zero in (1, 2) else "off",
        reshard=plan.reshard if plan.zero < 3 else rng.choice((plan.reshard, plan.reshard, "auto")),
    )
