"""What PyTorch 2.13 holds of its operators when it decides what to save, by their aten names.

Facts of ``torch._functorch.partitioners.get_default_op_list`` and of the operators' own tags and schemas;
names without overloads. The joint-graph cases (``remat_cases.py``) name operators like this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from distsim.transforms.recompute.saves import Trait

Shape = Sequence[int]


def names(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


# Cheap to recompute and fusible.
ALLOWED = names("""
    __and__ __ilshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _grad_sum_to_size _to_copy
    _unsafe_view abs acos acosh add addcdiv addcmul alias amax angle any arange argmax as_strided asin
    asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor broadcast_tensors ceil celu clamp clamp_max clamp_min clip clone conj_physical copysign
    cos cosh deg2rad digamma div elu empty empty_like eq equal erf erfc erfinv exp exp2 expand expm1
    float_power floor fmax fmin fmod frac frexp full full_like gather gcd ge gelu gelu_backward gt
    hardshrink hardsigmoid hardtanh heaviside hypot i0 igamma igammac index isfinite isinf isnan
    isneginf isposinf lcm ldexp le leaky_relu lerp lgamma lift_fresh_copy log log10 log1p log2 logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt masked_fill max
    maximum mean min minimum mish mul mvlgamma nan_to_num native_dropout_backward ne neg new_zeros
    nextafter ones permute polygamma positive pow rad2deg reciprocal relu relu6 remainder reshape round
    rrelu rsqrt rsub scalar_tensor select selu sgn sigmoid sigmoid_backward sign signbit silu
    silu_backward sin sinc sinh slice softplus softshrink special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_entr special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e
    special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta
    split sqrt square squeeze std sub sum sum_to_size t tan tanh tanh_backward threshold
    threshold_backward to triu true_divide trunc type_as unsqueeze var var_mean view where xlogy zeros
    zeros_like _low_memory_max_pool_offsets_to_indices broadcast_in_dim convert_element_type iota
    prepare_softmax_online
    """)

VIEWS = names("squeeze unsqueeze alias view slice t broadcast_in_dim expand as_strided permute select split")

# The result shares its input's memory, but the partitioner does not count the op among the views.
ALIASES = names("""
    _conj _nested_view_from_buffer _reshape_alias _unsafe_view adjoint chunk conj contiguous detach diagonal
    expand_as hsplit imag lift_fresh mH mT movedim narrow real split_with_sizes swapaxes swapdims
    tensor_split transpose unbind unflatten unfold view_as view_as_complex view_as_real vsplit
    """)

# Each call draws anew. PyTorch's rules know the first three only.
FUSIBLE_RANDOM = names("native_dropout rand_like randn_like")
RANDOM = FUSIBLE_RANDOM | names(
    """
    _fused_dropout _standard_gamma alpha_dropout bernoulli binomial cauchy dropout exponential geometric
    log_normal multinomial normal normal_functional poisson rand randint randint_like randn randperm rrelu
    rrelu_with_noise_functional uniform inductor_rand_eager_offset inductor_rand_eager_offsets inductor_seed
    inductor_seeds
    """
)

# They may draw; they survive the removal of dead ops.
SEEDED = names(
    """
    _cudnn_rnn _efficient_attention_forward _flash_attention_forward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable gru lstm miopen_rnn rnn_relu rnn_tanh
    """
)

COMPUTE_INTENSIVE = names("""
    mm convolution convolution_backward bmm addmm _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _flash_attention_forward _efficient_attention_forward
    upsample_bilinear2d _scaled_mm
    """)

# Their tensors come in a list, of which the rule for reductions counts nothing; of the second set all but
# the first input.
LISTS = names("cat stack meshgrid block_diag broadcast_tensors einsum _chunk_cat")
INDEXED = names("index index_put _unsafe_index _unsafe_index_put")

# What an op gives follows from its tensors, its result's shape and its name alone.
PLAIN = names(
    """
    _log_softmax _native_batch_norm_legit _softmax _to_copy _unsafe_view abs acos acosh alias amax amin arange
    asin asinh atan atan2 atanh avg_pool2d bitwise_and bitwise_not bitwise_or bitwise_xor bmm cat ceil celu
    clone convert_element_type convolution cos cosh cumsum detach digamma elu embedding eq erf erfc erfinv exp
    exp2 expand expm1 floor ge gelu gelu_backward gt hardsigmoid hardswish hardtanh isfinite isinf isnan le
    leaky_relu lgamma linalg_vector_norm log log10 log1p log2 log_sigmoid_forward logical_and logical_not
    logical_or logical_xor logsumexp lt max_pool2d_with_indices maximum mean minimum mish mm
    native_group_norm native_layer_norm ne neg nll_loss_forward ones_like permute reciprocal relu round rsqrt
    scalar_tensor selu sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus sqrt square
    squeeze std sum t tan tanh tanh_backward threshold_backward transpose trunc unsqueeze var var_mean view
    ones where zeros zeros_like
    """
)
BINARY = names("add addcmul addmm baddbmm div mul pow sub masked_fill")

SIZES = re.compile(r"^aten\.sym_|^<built-in function (?!getitem)|^<function _?sym_|^<class 'torch\.Sym")


def packet(target: str) -> str:
    """Return an operator's name without its namespace and overload: ``mm`` for ``aten.mm.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims", "_c10d_functional") else target


def is_item(target: str) -> bool:
    """Tell whether the op takes one of several outputs of another."""
    return target == "<built-in function getitem>"


def is_size(target: str) -> bool:
    """Tell whether the op gives a symbolic size."""
    return SIZES.match(target) is not None


def mutates(target: str) -> bool:
    """Tell whether the op writes into an input."""
    name = packet(target)
    return target.startswith("aten.") and name.endswith("_") and not name.endswith("__")


def traits(target: str) -> Trait:
    """Return what the rules for recomputation know of an operator."""
    if target.startswith("_c10d_functional."):
        if packet(target) == "wait_tensor":
            return Trait.COLLECTIVE | Trait.WAIT | Trait.KEPT
        return Trait.COLLECTIVE
    if is_item(target) or is_size(target):
        return Trait.FUSIBLE | Trait.ALLOWED
    if not target.startswith(("aten.", "prims.")):
        return Trait.NONE
    name = packet(target)
    found = Trait.NONE
    if name in ALLOWED:
        found |= Trait.ALLOWED | Trait.FUSIBLE
    if name in VIEWS:
        found |= Trait.VIEW
    if name in ALIASES:
        found |= Trait.ALIAS
    if name in COMPUTE_INTENSIVE:
        found |= Trait.COMPUTE_INTENSIVE
    if name in RANDOM:
        found |= Trait.RANDOM | Trait.KEPT | (Trait.FUSIBLE if name in FUSIBLE_RANDOM else Trait.NONE)
    if name in SEEDED:
        found |= Trait.KEPT
    if name == "cat":
        found |= Trait.CONCATENATION
    if name in ("lift_fresh", "lift_fresh_copy"):
        found |= Trait.COPYABLE
    if mutates(target):
        found |= Trait.IMPURE
    return found


def mergeable(target: str, inputs: int) -> bool:
    """Tell whether two calls with the same tensors and result shape are certain to give the same value.

    The cases record tensors only: ``pow(x, 2)`` and ``pow(x, 3)`` look alike in them and stay apart.
    """
    name = packet(target)
    return target.startswith(("aten.", "prims.")) and (name in PLAIN or (name in BINARY and inputs > 1))


def flops(target: str, shapes: Sequence[Shape | None], result: Shape | None) -> float:
    """Return the multiply-add FLOPs that ``torch.utils.flop_counter`` counts, at least 1, of any op.

    >>> flops("aten.mm.default", [[2, 3], [3, 4]], [2, 4])
    48.0
    """
    name = packet(target)
    known = [shape for shape in shapes if shape]
    count = 0
    if name in ("mm", "_scaled_mm", "bmm", "addmm", "baddbmm") and known and result:
        first = known[1] if name in ("addmm", "baddbmm") and len(known) > 2 else known[0]
        count = 2 * math.prod(result) * first[-1]
    elif name in ("convolution", "_convolution", "cudnn_convolution") and len(known) > 1 and result:
        data, weight = known[0], known[1]
        if min(len(data), len(weight), len(result)) < 2:
            return 1.0
        transposed = data[1] == weight[0] != weight[1] and result[1] != weight[0]
        places = data[2:] if transposed else result[2:]
        count = 2 * math.prod(places) * math.prod(weight[2:]) * data[0] * weight[0] * weight[1]
    elif name in ATTENTION and len(known) > 2:
        query, key, value = known[:3]
        count = 2 * math.prod(query[:-1]) * math.prod(key[-2:-1]) * (query[-1] + value[-1])
    return float(max(count, 1))


ATTENTION = names("""
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_cudnn_attention
    """)
