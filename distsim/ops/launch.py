"""What else a device and its host do: ``Launch``, ``Slowdown`` and ``Await``.

``Launch`` has the device run a kernel. It is no op of a model: tasks have it, on the stream ``host``, before
the kernel that waits for it. ``Slowdown`` is none either: what computation loses while a collective runs
beside it, on the stream ``compute`` where the collective is issued; where computation waits for the
collective anyway, it is lost in that. ``Await`` hands its first operand on; the host issues what follows in
its function only when all of them are there; with ``all=1`` when the device has done all computation that it
was given before. With ``device=1`` the device computes nothing of what follows before they are there, and no
host waits.
"""

from __future__ import annotations

from distsim.errors import TypeRuleError
from distsim.ir.function import Op
from distsim.ir.type import Tensor
from distsim.ir.value import NO_ATTRIBUTES, Attributes
from distsim.ops.operator import Operator, Work, register
from distsim.ops.places import view_work


def _await_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs:
        raise TypeRuleError("Await takes a value, and values that the host waits for; none given")
    return inputs[:1]


register(Operator("Launch", work=lambda signature: Work(0.0, 0.0, 0.0), issues=True))
register(Operator("Slowdown", work=lambda signature: Work(0.0, 0.0, 0.0), stalls=True))
register(
    Operator(
        "Await",
        types=_await_types,
        compute=lambda attributes, arrays: [arrays[0]],
        work=view_work,
        view=True,
        host_waits=True,
    )
)

LAUNCH = Op("Launch", (), (), NO_ATTRIBUTES)
"""The launch of some kernel, or the host's waiting for something."""

SLOWDOWN = Op("Slowdown", (), (), NO_ATTRIBUTES)
"""What computation loses to some collective."""

HOST = "host"
"""The stream on which the host of a device issues its kernels."""
