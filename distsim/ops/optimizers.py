"""Updates of one parameter from its gradient: SGD, momentum, Adam, each with a master copy or without.

``XOptimizer(weight, gradient, states..., master?)`` makes the new weight, the new states and the new master,
where it reads the old ones: no second copy of anything. Each operand has an element type of its own. With a
master the update is of that, and the weight is what remains of it in the weight's type (Micikevicius et al.
2018, "Mixed precision training", section 3.1). All is computed in the type of what is updated, in float32 if
that has less: a kernel keeps its numbers in registers.

One kernel would read and write each operand once, but what frameworks run is more (:func:`passes`): none of
their kernels writes a weight beside its master copy, which another one copies (torch knows no masters;
nanotron c2528430, optim/gradient_accumulator.py, ``half_param.copy_(fp32_param)``; Megatron-LM d98e8a64,
core/optimizer/optimizer.py, ``_copy_main_params_to_model_params``; DeepSpeed, runtime/zero/stage_1_and_2.py,
``bit16_partitions[partition_id].data.copy_(fp32_partition.data)``). With ``kernel`` = "foreach" an update is
torch's sequence of kernels (pytorch 002d2f0b, torch/optim/adamw.py, ``_multi_tensor_adamw``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.normalization import widened
from distsim.ops.operator import Array, Operator, Signature, Work, common_device, memory_bound, register
from distsim.ops.places import same_shape_rule

Step = Callable[[Attributes, Array, Array, Sequence[Array]], tuple[Array, ...]]
"""(attributes, weight, gradient, states), all of one type -> the new weight, the new states."""


def _decayed(attributes: Attributes, weight: Array, grad: Array) -> Array:
    """Return the gradient with that of weight_decay / 2 times the squared norm of the weight."""
    decay = attributes.get("weight_decay", 0.0)
    return grad + decay * weight if decay else grad


def _sgd(attributes: Attributes, weight: Array, grad: Array, states: Sequence[Array]) -> tuple[Array, ...]:
    return (weight - attributes["lr"] * _decayed(attributes, weight, grad),)


def _momentum(
    attributes: Attributes, weight: Array, grad: Array, states: Sequence[Array]
) -> tuple[Array, ...]:
    """Sutskever et al. 2013, as torch.optim.SGD has it: the learning rate is not part of the velocity."""
    velocity = attributes["momentum"] * states[0] + _decayed(attributes, weight, grad)
    return weight - attributes["lr"] * velocity, velocity


def _adam(attributes: Attributes, weight: Array, grad: Array, states: Sequence[Array]) -> tuple[Array, ...]:
    """Kingma & Ba 2015, algorithm 1, at step ``step`` (1 at first).

    With ``decoupled`` the weight decays by itself (Loshchilov & Hutter 2019, AdamW), else with the gradient.
    """
    mean, square = states
    beta1, beta2, step = attributes["beta1"], attributes["beta2"], attributes["step"]
    kept = weight
    if attributes.get("decoupled", False):
        kept = weight - attributes["lr"] * attributes["weight_decay"] * weight
    else:
        grad = _decayed(attributes, weight, grad)
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    change = (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + attributes["eps"])
    return kept - attributes["lr"] * change, mean, square


def passes(op_type: str, attributes: Attributes, has_master: bool) -> tuple[tuple[str, str], ...]:
    """Return what each kernel of an update reads and writes.

    w is what is updated, g its gradient, m and v are its states, t is a temporary of the type of the last of
    them, p the weight that is copied from a master.

    >>> passes("SGDOptimizer", Attributes({}), True)
    (('wg', 'w'), ('w', 'p'))
    """
    states = "mv"[: _OPTIMIZERS[op_type][0]]
    copy = (("w", "p"),) if has_master else ()
    if attributes.get("kernel") != "foreach":
        return (f"wg{states}", f"w{states}"), *copy
    decay = attributes.get("weight_decay", 0.0)
    decoupled = attributes.get("decoupled", False)
    before = () if not decay else (("w", "w"),) if decoupled else (("wg", "g"),)  # mul_; add
    own = {
        "": (("wg", "w"),),  # add_
        "m": (("m", "m"), ("mg", "m"), ("wm", "w")),  # mul_, add_; add_
        # lerp_; mul_, addcmul_; sqrt, div_, add_; addcdiv_
        "mv": (("mg", "m"), ("v", "v"), ("vg", "v"), ("v", "t"), ("t", "t"), ("t", "t"), ("wmt", "w")),
    }
    return *before, *own[states], *copy


def launches_of(signature: Signature) -> int:
    """Return how many kernels an update is."""
    states, _, _ = _OPTIMIZERS[signature.op_type]
    return len(passes(signature.op_type, signature.attributes, len(signature.inputs) > states + 2))


def _work(signature: Signature) -> Work:
    states, flops, _ = _OPTIMIZERS[signature.op_type]
    weight, grad, *kept = [float(tensor.nbytes) for tensor in signature.inputs]
    has_master = len(kept) > states
    sizes = {"p": weight, "g": grad, "w": kept[-1] if has_master else weight}
    sizes |= dict(zip("mv", kept[:states], strict=False))
    sizes["t"] = kept[states - 1] if states else 0.0
    moved = passes(signature.op_type, signature.attributes, has_master)
    read, written = (sum([sizes[each] for each in "".join(side)]) for side in zip(*moved, strict=True))
    return Work(memory_bound(signature, flops).flops, read, written)


def _register(name: str, states: int, step: Step) -> None:
    """Register an optimizer that keeps so many states of each parameter."""
    least = 2 + states

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) not in (least, least + 1):
            raise TypeRuleError(
                f"{name} takes {least} inputs, or {least + 1} with a master, {len(inputs)} given"
            )
        for tensor in inputs[1:]:
            if tensor.shape != inputs[0].shape:
                raise TypeRuleError(f"{name}: shapes {inputs[0].shape} and {tensor.shape} must agree")
        device = common_device(name, inputs)
        return tuple([tensor.on(device) for tensor in (inputs[0], *inputs[2:])])

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = arrays[least] if len(arrays) > least else arrays[0]
        held = widened(given)
        others = [array.astype(held.dtype, copy=False) for array in arrays[1:least]]
        new, *made = step(attributes, held, others[0], others[1:])
        results = [new, *made, new]
        kept = (arrays[0], *arrays[2:])
        return [made.astype(old.dtype, copy=False) for made, old in zip(results, kept, strict=False)]

    register(
        Operator(
            name,
            types=types,
            compute=compute,
            work=_work,
            sharding=same_shape_rule,
            in_place={0: 0} | {place: place + 1 for place in range(1, states + 2)},
        )
    )


_OPTIMIZERS: dict[str, tuple[int, float, Step]] = {
    "SGDOptimizer": (0, 2.0, _sgd),
    "MomentumOptimizer": (1, 2.0, _momentum),
    "AdamOptimizer": (2, 4.0, _adam),
}
for _name, (_states, _, _step) in _OPTIMIZERS.items():
    _register(_name, _states, _step)

OPTIMIZER_OPS = frozenset(_OPTIMIZERS)
"""The operators that update a parameter. Attribute ``kernel`` = "single": no launch does it with others;
"foreach": see :func:`passes`."""
