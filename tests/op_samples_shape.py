"""Samples of the operators that move elements: shapes, blocks, indices, windows."""

from __future__ import annotations

import numpy as np
from op_samples import Sample, integers, sample

from distsim.ir import Literal

SHAPE: tuple[Sample, ...] = (
    sample("Reshape", (4, 6, 2), shape=(24, 2)),
    sample("Reshape", (8, 6), shape=(2, 4, -1)),
    sample("Reshape", (2, 4, 12), shape=(0, 0, 4, 3)),
    sample("Reshape", (0, 4), shape=(4, 0), allowzero=1),
    sample("Reshape", (6, 4), shape=(8, 3)),
    sample("Reshape", (4, 6), version=5, shape=(6, 4)),
    sample("Flatten", (4, 2, 6)),
    sample("Flatten", (4, 2, 6), axis=-1),
    sample("Flatten", (4, 2), axis=0),
    sample("Squeeze", (4, 1, 2), axes=(1,)),
    sample("Squeeze", (2, 1, 4)),
    sample("Squeeze", (2, 1, 4), version=11, axes=(1,)),
    sample("Unsqueeze", (4, 2), axes=(0, -1)),
    sample("Unsqueeze", (4, 2), version=11, axes=(1,)),
    sample("Unflatten", (7,), shape=(2, 3)),
    sample("Unflatten", (6,), shape=(2, 3)),
    sample("Unflatten", (4,), shape=()),
    sample("Transpose", (4, 6, 2)),
    sample("Transpose", (4, 6, 2, 8), perm=(0, 2, 3, 1)),
    sample("Expand", (4, 1, 2), shape=(6, 1, 8, 2)),
    sample("Expand", (2,), shape=(4, 2)),
    sample("Expand", (4, 2), shape=(1, 1)),
    sample("Tile", (4, 2), repeats=(1, 3)),
    sample("Tile", (1, 4), repeats=(6, 1)),
    sample("Tile", (4, 2), repeats=(2, 2)),
    sample("Tile", (4, 2), repeats=(1, 1)),
    sample("Tile", (4, 0), repeats=(3, 1)),
    sample("Shape", (4, 2), grads=()),
    sample("Size", (4, 2), grads=()),
    sample("Accumulate", (4, 2), grads=()),
    sample("ForwardOutput", (4, 2)),
)

MOVEMENT: tuple[Sample, ...] = (
    sample("Concat", (4, 2), (4, 6), axis=-1),
    sample("Concat", (2, 6, 2), (4, 6, 2), (2, 6, 2), axis=0),
    sample("Concat", (4, 2), axis=0),
    sample("Split", (4, 12), axis=1, split=(2, 4, 6), grads=(0, 1, 2)),
    sample("Split", (4, 12), axis=-1, num_outputs=3, outputs=3, grads=(1,)),
    sample("Split", (4, 12), axis=-1, num_outputs=3, grads=(0, 2)),
    sample("Split", (7, 4), num_outputs=2, grads=(0,)),
    sample("Split", (8, 4), version=13, outputs=2, grads=(0, 1)),
    sample("Split", (8, 4), version=11, split=(2, 6), grads=(1,)),
    sample("Slice", (4, 6, 2), starts=(1,), ends=(5,), axes=(1,)),
    sample("Slice", (4, 6), starts=(0, -1), ends=(2**31, -(2**31)), axes=(0, 1), steps=(1, -2)),
    sample("Slice", (4, 6), version=1, starts=(0, 2), ends=(4, 5)),
    sample("Slice", (4, 2), starts=(-1,), ends=(-(2**63),), axes=(0,), steps=(-1,)),
    sample("Pad", (4, 2, 6), pads=(0, 1, 0, 0, 2, 0)),
    sample("Pad", (4, 6), pads=(0, -1, 0, 3), constant_value=2.5),
    sample("Pad", (4, 6), np.asarray(1.5), pads=(1, 0, 0, 0)),
    sample("Pad", (4, 6), pads=(2, 1), axes=(-1,), mode="reflect"),
    sample("Pad", (4, 6), pads=(2, 1), axes=(1,), mode="edge"),
    sample("Pad", (4, 6), pads=(2, 1), axes=(1,), mode="wrap"),
    sample("Pad", (4, 6), version=2, pads=(0, 1, 0, 2)),
    sample("DepthToSpace", (2, 16, 4, 2), blocksize=2),
    sample("DepthToSpace", (2, 16, 4, 2), blocksize=2, mode="CRD"),
    sample("SpaceToDepth", (2, 2, 4, 8), blocksize=2),
)

FILLED: tuple[Sample, ...] = (
    sample("Constant", value=Literal(np.arange(6.0).reshape(2, 3))),
    sample("ConstantOfShape", input=(4, 2)),
    sample("ConstantOfShape", input=(4, 2), value=Literal(np.array([2.5]))),
    sample("Range", start=1, limit=9, delta=2),
    sample("OneHot", integers(4, 2, high=6), depth=6, values=(0.0, 1.0), grads=()),
    sample("OneHot", integers(4, 2, high=6), (2,), depth=6, axis=0, grads=()),
    sample("EyeLike", (4, 4)),
    sample("Trilu", (2, 4, 6)),
    sample("Trilu", (2, 4, 4), k=-1, upper=0),
    sample("Trilu", (4, 4), np.asarray(1)),
)

# A permutation for scatters that replace: what two updates of one place would leave is not defined.
_PLACES = np.array([[0, 3, 1, 2], [2, 0, 3, 1]])

INDEXING: tuple[Sample, ...] = (
    sample("Gather", (10, 4), integers(2, 6, high=10, low=-10)),
    sample("Gather", (4, 6, 2), integers(4, high=6), axis=1),
    sample("Gather", (4, 6, 2), axis=1, indices=-1),
    sample("Gather", (4, 6), axis=-1, indices=(0, 2, 2, 5)),
    sample("Gather", integers(2, 4, high=3), data=(5, 7, 9), grads=()),
    sample("Gather", (6,), integers(4, high=6)),
    sample("GatherElements", (4, 6, 2), integers(4, 8, 2, high=6, low=-6), axis=1),
    sample("GatherElements", (4, 6), integers(2, 4, high=4)),
    sample("GatherElements", (6,), indices=(1, 1, 5)),
    sample("GatherND", (4, 6, 2), integers(2, 4, 2, high=4)),
    sample("GatherND", (4, 6, 2), integers(4, 8, 1, high=6), batch_dims=1),
    sample("GatherND", (4, 6, 2), integers(4, 1, high=6), batch_dims=1),
    sample("GatherND", (4, 6, 2), indices=(1, 2)),
    sample("GatherGrad", integers(2, 4, high=6), (2, 4, 6), shape=(6, 6)),
    sample("GatherElementsGrad", integers(4, 8, high=6), (4, 8), shape=(4, 6), axis=1),
    sample("GatherNDGrad", integers(4, 8, 1, high=6), (4, 8, 2), shape=(4, 6, 2), batch_dims=1),
    sample("ScatterND", (4, 6, 2), np.array([[0, 1], [3, 5], [2, 2]]), (3, 2)),
    sample("ScatterND", (4, 6), integers(8, 1, high=4), (8, 6), reduction="add"),
    sample("ScatterND", (4, 6), integers(8, 1, high=4), (8, 6), reduction="max", grads=()),
    sample("ScatterND", (4, 6), (6,), indices=(2,)),
    sample("ScatterElements", (4, 4), _PLACES.T, (4, 2), axis=0),
    sample("ScatterElements", (2, 6), _PLACES, (2, 4), axis=1),
    sample("ScatterElements", (4, 6), integers(4, 8, high=6), (4, 8), axis=1, reduction="add"),
    sample("ScatterElements", (4, 6), integers(4, 8, high=6), (4, 8), axis=1, reduction="mul", grads=()),
    sample("ScatterElements", (6,), (2,), indices=(0, 4)),
)

CONVOLUTION: tuple[Sample, ...] = (
    sample("Conv", (2, 4, 6, 5), (6, 4, 3, 2), strides=(2, 1), pads=(1, 0, 0, 1)),
    sample("Conv", (2, 4, 6, 5), (6, 4, 3, 2), (6,), dilations=(2, 1), auto_pad="SAME_UPPER"),
    sample("Conv", (2, 4, 6), (4, 1, 3), (4,), group=4, pads=(1, 1)),
    sample("Conv", (2, 4, 6), (8, 1, 3), group=4, strides=(2,)),
    sample("Conv", (2, 8, 6), (8, 4, 3), group=2),
    sample("Conv", (2, 4, 6), (1, 4, 3), B=np.array([1.5])),
    sample("Conv", (1, 2, 3, 4, 3), (2, 2, 2, 2, 2)),
    sample("ConvGrad", (2, 4, 6), (6, 4, 3), (2, 6, 4)),
    sample("ConvTranspose", (2, 4, 3, 4), (4, 6, 3, 2), strides=(2, 3), pads=(1, 0, 0, 1)),
    sample("ConvTranspose", (2, 4, 3), (4, 2, 3), (2,), strides=(2,), output_padding=(1,), pads=(1, 1)),
    sample("ConvTranspose", (2, 4, 3), (4, 2, 3), dilations=(2,), strides=(2,), output_shape=(8,)),
    sample("ConvTranspose", (2, 4, 3), (4, 2, 3), strides=(2,), auto_pad="SAME_UPPER"),
    sample("ConvTranspose", (2, 4, 3), (4, 1, 3), (4,), group=4, strides=(2,)),
    sample("ConvTranspose", (2, 4, 3), (4, 1, 3), B=np.array([1.5])),
    sample("MaxPool", (2, 4, 6, 5), kernel_shape=(3, 2), strides=(2, 1), pads=(1, 0, 1, 1)),
    sample("MaxPool", (2, 4, 7), kernel_shape=(2,), strides=(3,), ceil_mode=1),
    sample("MaxPool", (2, 4, 6), kernel_shape=(2,), dilations=(2,), auto_pad="SAME_LOWER"),
    sample("MaxPool", (2, 4, 6), kernel_shape=(2,), outputs=2),
    sample("AveragePool", (2, 4, 6, 5), kernel_shape=(3, 2), strides=(2, 1), pads=(1, 0, 1, 1)),
    sample("AveragePool", (2, 4, 7), kernel_shape=(2,), strides=(3,), ceil_mode=1),
    sample("AveragePool", (2, 4, 7), kernel_shape=(3,), pads=(1, 1), strides=(2,), count_include_pad=1),
    sample("GlobalAveragePool", (2, 4, 6, 3)),
    sample("GlobalMaxPool", (2, 4, 6, 3)),
    sample("Resize", (2, 4, 3, 3), scales=(1.0, 1.0, 2.0, 1.5), absent=("roi",)),
    sample("Resize", (2, 4, 3), sizes=(2, 4, 6), mode="linear", absent=("roi", "scales")),
    sample("Resize", (2, 4, 3), sizes=(6,), axes=(2,), mode="cubic", absent=("roi", "scales")),
)

EINSUM: tuple[Sample, ...] = (
    sample("Einsum", (2, 4, 6), (2, 6, 8), equation="bij,bjk->bik"),
    sample("Einsum", (2, 1, 4, 6), (2, 8, 6, 2), equation="...ij,...jk"),
    sample("Einsum", ((1,) * 38 + (2, 4)), (4, 6), equation="...ij,jk"),  # more dimensions than capitals
    sample("Einsum", (2, 4, 6, 2), (2, 8, 6, 2), equation="bqhd,bkhd->bhqk"),
    sample("Einsum", (4, 6), equation="ij->j"),
    sample("Einsum", (4, 6), (2,), equation="ij,k->ki"),
    sample("Einsum", (4,), (6,), (2,), equation="i,j,k->kij"),
    sample("Einsum", (4, 4), equation="ii->i", grads=()),
)

SAMPLES: tuple[Sample, ...] = SHAPE + MOVEMENT + FILLED + INDEXING + CONVOLUTION + EINSUM
