"""CUDA without a GPU: the kernels run on the host against the oracle, and compile without spills.

On a GPU the backend ``cuda`` takes part in test_attention.py like every other.
"""

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from table import Case, check, eager, inputs, oracle, results
from torch import Tensor

from attnfast.ops.attention import accumulation_dtype

ROOT = Path(__file__).parent.parent
HOST = ROOT / "tests" / "cuda_host"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TILE = 32  # query rows that share a row of grad_weight


# ---- the kernels on the host ----------------------------------------------------------------------


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [
        (x, ctypes.c_int64) for x in ("batch", "head", "row", "column")
    ]


class Attention(ctypes.Structure):
    """The struct of csrc/attention.h."""

    _fields_ = [
        ("dtype", ctypes.c_int),
        *[(x, ctypes.c_int64) for x in ("B", "H", "Tq", "Tk", "A", "Dv")],
        ("scale", ctypes.c_double),
        *[(x, View) for x in ("query", "key", "value", "weight", "bias", "mask")],
        ("lengths", ctypes.c_void_p),
        *[(x, View) for x in ("context", "weights", "log_sum_exp", "grad_context", "grad_weights")],
        *[(x, View) for x in ("grad_log_sum_exp", "grad_score", "grad_query", "grad_key")],
        *[(x, View) for x in ("grad_value", "grad_weight")],
        ("rows", ctypes.c_int64),
    ]


def view(x: Tensor | None) -> View:
    """Describe [B, H, rows, columns], [B, H, rows] or [H, A]."""
    if x is None:
        return View()
    strides = [*x.stride(), 0] if x.dim() == 3 else x.stride()
    return View(x.data_ptr(), *((0, strides[0], 0, 1) if x.dim() == 2 else strides))


def build(folder: Path, *flags: str) -> Path:
    cxx = os.environ.get("CXX") or "g++"
    if not shutil.which(cxx):
        pytest.skip(f"there is no C++ compiler {cxx}")
    out = folder / "cuda_host.so"
    command = [cxx, "-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-pthread", *flags]
    subprocess.run([*command, f"-I{HOST}", str(HOST / "attention.cpp"), "-o", str(out)], check=True)
    return out


class Host:
    """What the launcher does, for the library built by :func:`build`."""

    def __init__(self, library: Path):
        self.run = ctypes.CDLL(str(library)).run

    def call(self, backward: bool, scale: float, lengths: Tensor | None, **views: Tensor | None):
        query, key, value = (views[x] for x in ("query", "key", "value"))
        B, H, Tq, A = query.shape
        lengths = None if lengths is None else lengths.long()
        a = Attention(
            DTYPES.index(query.dtype), B, H, Tq, key.shape[-2], A, value.shape[-1], scale,
            lengths=None if lengths is None else lengths.data_ptr(),
            **{k: view(v) for k, v in views.items()},
        )  # fmt: skip
        self.run(ctypes.byref(a), ctypes.c_bool(backward))

    def attend(self, **args: Tensor | None):
        """Run forward and return context, weights and log-sum-exp, differentiable."""
        return HostAttention.apply(self, *(args[k] for k in INPUTS))


INPUTS = ("query", "key", "value", "weight", "bias", "mask", "lengths")


def rows(x: Tensor | None, dims: int = 4) -> Tensor | None:
    """Add the head axis that is missing, and make the last axis dense."""
    if x is None or x.dim() == dims:
        return x if x is None or x.stride(-1) == 1 else x.contiguous()
    return rows(x.unsqueeze(1), dims)


class HostAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, host, query, key, value, weight, bias, mask, lengths):
        shape = (*query.shape[:-1], key.shape[-2])
        sums = accumulation_dtype(query.dtype)
        out = {
            "context": query.new_full((*shape[:-1], value.shape[-1]), torch.nan),
            "weights": query.new_full(shape, torch.nan, dtype=sums),
            "log_sum_exp": query.new_full(shape[:-1], torch.nan, dtype=sums),
        }
        weight = None if weight is None else weight.expand(-1 if weight.dim() == 2 else 1, -1)
        fixed = {k: rows(v.detach()) for k, v in zip(INPUTS, (query, key, value))}
        fixed["weight"] = weight
        extra = {k: None if v is None else v.expand(shape) for k, v in (("bias", bias), ("mask", mask))}
        extra = {k: None if v is None else v.view(v.shape) for k, v in extra.items()}
        four = {k: v if v is None or v.dim() == 4 else v.unsqueeze(1) for k, v in extra.items()}
        views = {k: rows(v, 3 if k == "log_sum_exp" else 4) for k, v in out.items()}
        host.call(False, 1.0, lengths, **fixed, **four, **views)
        ctx.host, ctx.fixed, ctx.lengths, ctx.views = host, fixed, lengths, views
        ctx.shapes = [None if x is None else x.shape for x in (query, key, value, weight, bias)]
        return tuple(out.values())

    @staticmethod
    def backward(ctx, grad_context, grad_weights, grad_log_sum_exp):
        query, weight, weights = ctx.fixed["query"], ctx.fixed["weight"], ctx.views["weights"]
        B, H, Tq, A = query.shape
        grads = {f"grad_{k}": torch.full_like(ctx.fixed[k], torch.nan) for k in INPUTS[:3]}
        grads = {k: v.contiguous() for k, v in grads.items()}
        grads["grad_weight"] = weights.new_full((B, H, -(-Tq // TILE), A), torch.nan)
        grads["grad_score"] = torch.full_like(weights, torch.nan)
        ctx.host.call(
            True, 1.0, ctx.lengths, **ctx.fixed, **grads, weights=weights,
            grad_context=rows(grad_context), grad_weights=rows(grad_weights),
            grad_log_sum_exp=rows(grad_log_sum_exp.contiguous(), 3),
        )  # fmt: skip
        *result, grad_weight, grad_bias = [x for x in grads.values()]
        return None, *result, grad_weight, grad_bias, None, None
