"""A model of ``step_models.py`` as torchtitan wraps it, over one rank; needs torch, and torchao for 8 bits.

FSDP2 of every layer and the whole with parameters in bfloat16 and gradients reduced in float32
(torchtitan/distributed/fsdp.py), layers compiled one by one, the loss by itself, selective checkpoints that
save what ``_SAVED`` names but for every second product (torchtitan/distributed/activation_checkpoint.py),
linear layers in 8 bits but for the output head (torchao.float8). With one rank nothing is sent; what FSDP2
casts and copies is there. Since April 2025 torchtitan also has the compiler emulate casts between fused ops
with scales of rows (``emulate_precision_casts``); not here.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

from step_models import Step

_SAVED = (
    *("aten.mm", "aten.max", "aten._scaled_dot_product_efficient_attention"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_cudnn_attention"),
    "_c10d_functional.reduce_scatter_tensor",
)


def join_alone(device: str) -> None:
    """Make this process the only rank of its group, if it is in none."""
    group = import_module("torch.distributed")
    if not group.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        group.init_process_group(backend, store=group.HashStore(), rank=0, world_size=1)


def wrapped(torch: Any, model: Any, step: Step) -> Any:
    """Return the model of a sharded step, its layers wrapped in place."""
    if step.precision.startswith("fp8"):
        _in_eight_bits(model, step.precision.removeprefix("fp8 "))
    functional, layers = torch.nn.functional, model.layers
    for place in range(len(layers)):
        layers[place] = torch.compile(_checkpointed(torch, layers[place], step.recompute), fullgraph=True)
    model.loss = torch.compile(lambda logits, labels: functional.cross_entropy(logits.float(), labels))
    fsdp = import_module("torch.distributed.fsdp")
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for place, layer in enumerate(layers):
        fsdp.fully_shard(layer, mp_policy=policy, reshard_after_forward=place < len(layers) - 1)
    fsdp.fully_shard(model, mp_policy=policy)
    return model


def _in_eight_bits(model: Any, recipe: str) -> None:
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name != "head"
    )


def _checkpointed(torch: Any, layer: Any, recompute: str) -> Any:
    if recompute == "none":
        return layer
    wrapper = import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper").checkpoint_wrapper
    if recompute == "full":
        return wrapper(layer, preserve_rng_state=False)
    checkpoint, product = torch.utils.checkpoint, torch.ops.aten.mm.default
    spaces = [name.split(".") for name in _SAVED]
    saved = {getattr(getattr(torch.ops, space), op).default for space, op in spaces}

    def contexts() -> Any:
        count = Counter[bool]()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            count[context.is_recompute] += op == product
            kept = op in saved and not (op == product and count[context.is_recompute] % 2 == 0)
            policies = checkpoint.CheckpointPolicy
            return policies.MUST_SAVE if kept else policies.PREFER_RECOMPUTE

        return checkpoint.create_selective_checkpoint_contexts(policy)

    return wrapper(layer, context_fn=contexts, preserve_rng_state=False)
