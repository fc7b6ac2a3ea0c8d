"""``Launch``: what the host of a device does to have it run a kernel.

No op of a model: tasks have it, on the stream ``host``, before the kernel that waits for it. It takes nothing
of the device.
"""

from __future__ import annotations

from distsim.ir.function import Op
from distsim.ir.value import NO_ATTRIBUTES
from distsim.ops.operator import Operator, Work, register

register(Operator("Launch", work=lambda signature: Work(0.0, 0.0, 0.0), issues=True))

LAUNCH = Op("Launch", (), (), NO_ATTRIBUTES)
"""The launch of some kernel."""

HOST = "host"
"""The stream on which the host of a device issues its kernels."""
