"""Copies between the memory of devices and that of their hosts: ``Offload`` and ``Fetch``.

``Offload`` copies its operands to the host, ``Fetch`` back, all of them one after the other, over
``Device.host_link`` and on a stream of its own (``offload``, ``fetch``): both directions run at full speed at
once. What is on the host (``Tensor.on_host``) takes no memory of the device, so that a value that is only
read after a ``Fetch`` of it is free on the device once it was copied; ``Fetch`` gives the memory of the host
back (:mod:`distsim.simulation.memory.host`), so a value is fetched once. Neither is an op of a model: saved
activations are offloaded by :mod:`distsim.transforms.recompute.offload`.
"""

from __future__ import annotations

from dataclasses import replace

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.operator import Operator, Work, common_device, register


def _register_copy(name: str, stream: str, to_host: bool) -> None:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs:
            raise TypeRuleError(f"{name} takes at least one value; none given")
        common_device(name, inputs)
        for tensor in inputs:
            if tensor.on_host == to_host:
                raise TypeRuleError(f"{name}: {tensor} is {'on' if to_host else 'not on'} the host already")
        return tuple([replace(tensor, on_host=to_host) for tensor in inputs])

    register(
        Operator(
            name,
            types=types,
            compute=lambda attributes, arrays: list(arrays),
            work=lambda signature: Work(0.0, 0.0, 0.0),
            host_stream=stream,
        )
    )


_register_copy("Offload", "offload", to_host=True)
_register_copy("Fetch", "fetch", to_host=False)
