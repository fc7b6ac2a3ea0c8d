"""Samples of the operators that compute numbers: products, element-wise ones, reductions, norms."""

from __future__ import annotations

import numpy as np
from op_checks import Sample, integers, normal, positive, sample, unit

MATMUL: tuple[Sample, ...] = (
    sample("MatMul", (4, 6), (6, 8)),
    sample("MatMul", (2, 4, 6), (6, 8)),
    sample("MatMul", (2, 4, 2, 6), (2, 4, 6, 2)),
    sample("MatMul", (4, 1, 2, 6), (6, 6, 4)),
    sample("MatMul", (6, 4), (2, 4, 6)),
    sample("MatMul", (6,), (6, 4)),
    sample("MatMul", (2, 4, 6), (6,)),
    sample("MatMul", (6,), (6,)),
    sample("MatMul", (6,), (4, 6, 2)),
    sample("MatMul", (4, 1), B=np.array([[2.0]])),
    sample("MatMul", (1, 4), A=np.array([[2.0]])),
    sample("Gemm", (4, 6), (6, 8)),
    sample("Gemm", (6, 4), (6, 8), (8,), transA=1, alpha=0.5, beta=2.0),
    sample("Gemm", (4, 6), (8, 6), (4, 1), transB=1),
    sample("Gemm", (6, 4), (8, 6), (4, 8), transA=1, transB=1, beta=0.5),
    sample("Gemm", (6, 4), (8, 6), transA=1, transB=1, alpha=3.0),
    sample("Gemm", (4, 6), (8, 6), (1, 8), transB=1),
    sample("Gemm", (4, 6), (6, 8), C=np.array([3.0])),
    sample("Gemm", (4, 6), (6, 8), ()),
)
SAMPLES: tuple[Sample, ...] = MATMUL
