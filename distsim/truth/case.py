"""A row of published measurements as what distsim takes: model, plan, precision, software, cluster.

A row is translated by its columns alone (those of ``measured/validate.csv``), never by who published it or by
what was measured; what a column leaves open has the default of the software that the row names. What
distsim cannot lay out is refused by the name of the missing feature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from distsim.cache import cached
from distsim.hardware.variation import in_use
from distsim.ir import Function, Topology
from distsim.ir.kernel_rates import ATTENTION_KERNELS
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.plan import Plan
from distsim.plan.stacks import Stack
from distsim.transforms.autodiff.differentiate import differentiate
from distsim.transforms.autodiff.loss import add_loss
from distsim.transforms.autodiff.optimizers import optimizer_named
from distsim.transforms.autodiff.precision import Precision
from distsim.transforms.kernels.attention import set_attention
from distsim.transforms.key_heads import repeat_keys
from distsim.truth.architecture import sizes_of, with_named_sizes
from distsim.truth.layout import global_batch, layout_of
from distsim.truth.machine import Cluster, cluster_of
from distsim.truth.row import Row, number, plain
from distsim.truth.software import software_of


@dataclass(frozen=True)
class Case:
    """A row as what distsim takes.

    ``assumed`` says what no column does, ``left_out`` what a column says and distsim does not.
    """

    sizes: DecoderSizes
    seq: int
    batch: int
    plan: Plan
    precision: Precision
    attention: str
    kernels: str
    stack: Stack
    cluster: Cluster
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def joint(self) -> Function:
        """Return the training step of the model, with the stack's optimizer and clipping."""
        return _joint(self.sizes, self.batch, self.seq, self.attention, self.precision, self.stack)

    def topology(self) -> Topology:
        """Return the cluster of the row, as the slowest of the devices that it uses is."""
        return _used(self.cluster, self.plan.devices)


def case_of(row: Row) -> Case:
    """Return what a row ran.

    Raises :class:`MissingFeatureError` for what distsim does not lay out, build or cost, and where the row
    leaves out what has no default.
    """
    row, assumed = with_named_sizes(row), list[str]()
    software = software_of(row, assumed)
    stack = software.stack
    layout = layout_of(row, stack, assumed)
    sizes = sizes_of(row, "megatron" in plain(row, "framework"), layout.plan.tp, assumed)
    if sizes.experts is not None:  # each rank routes its own tokens
        routed = replace(sizes.experts, groups=layout.plan.sequence_parts, weighted=stack.weighted)
        clauses = re.split(r"[;,]", f"{plain(row, 'overlap')};{plain(row, 'framework')}")
        said = [each for each in clauses if re.search(r"\bdeep-?ep\b", each)]
        if said and not any(re.search(r"\b(no|not|without|off)\b", each) for each in said):
            routed = replace(routed, dispatcher="deepep")
        sizes = replace(sizes, experts=routed)
    cluster = cluster_of(row, layout.plan.devices, assumed)
    known = cluster.topology().devices[0].rates.attention(software.attention) is not None
    if software.attention in ATTENTION_KERNELS and not known:
        assumed.append(f"attention {software.attention} as fast as the usual kernel")
    return Case(
        *(sizes, number(row, "seq"), global_batch(row), layout.plan),
        *(software.precision, software.attention, software.kernels, stack),
        cluster,
        tuple(assumed),
        layout.left_out,
    )


@cached("clusters of rows, by their devices in use", 64)
def _used(cluster: Cluster, devices: int) -> Topology:
    return in_use(cluster.topology(), devices)


@cached("training steps of rows, by model, batch and software", 8)
def _joint(
    sizes: DecoderSizes, batch: int, seq: int, attention: str, precision: Precision, stack: Stack
) -> Function:
    form = "math" if attention == "math" else "flash"
    model = set_attention(decoder(sizes, batch, seq, attention=form), attention)
    if stack.repeated_keys:
        model = repeat_keys(model)
    return differentiate(add_loss(model, "auto"), optimizer_named(stack.optimizer), (), precision, stack.clip)
