"""Compile every Triton kernel ahead of time, as it would be launched, and hold it to a budget.

No GPU is needed. A subprocess runs the backend on CPU tensors with its launches recorded instead of
made, compiles each for a target, and reads registers, spills and instructions from machine code.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from machine_code import factored_loop, machine_code

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

#: The arguments of GPUTarget.
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
CASES = list(itertools.product(("float32",), ("tanh", "dot"), ("all", "span")))
CASES += itertools.product(("float32",), ("copying", "coverage"), ("plain", "all"))
CASES += itertools.product(("bfloat16",), ("tanh", "dot", "copying", "coverage"), ("all",))
CASES += [("float32", "relu", "all")]
CASES += itertools.product(("float32",), ("beam", "draws"), ("plain", "all"))
CASES += [("float32", "tanh", "plain"), ("float32", "tanh", "few"), ("bfloat16", "tanh", "wide")]
CASES += itertools.product(("float32",), ("tanh", "dot", "relu"), ("wide",))

#: Bytes of stack at most: room for a few predicates, for no loop's values; the scan's gradient also
#: puts by what it needs once for every row.
STACK = 32
STACK_OF = {"_scan_gradient": 64}
#: Registers per thread at most on sm_90, by kernel.
REGISTERS = {
    "_exponentials": 96,
    "_forward": 255,
    "_product": 176,
    "_score_gradient": 192,
    "_additive_gradient": 176,
    "_scan": 255,
    "_scan_gradient": 255,
    "_sort_keys": 80,
    "_distribution": 128,
    "_distribution_gradient": 128,
    "_score_words": 112,
    "_continue_beam": 96,
    "_trace": 64,
}
KERNELS = tuple(REGISTERS)
#: Machine codes at most, over batches of random lengths with the same dtype, score and features:
#: one for each form of blocks and role.
CODES = {
    "_exponentials": 5,
    "_forward": 4,
    "_product": 6,
    "_score_gradient": 2,
    "_additive_gradient": 8,
    "_scan": 3,
    "_scan_gradient": 3,
    "_sort_keys": 1,
    "_distribution": 2,
    "_distribution_gradient": 3,
}
#: In the inner loop in float32, per (query, key, feature): special functions, float32
#: instructions and all instructions at most.
INNER_LOOP = {"_forward": (0.5, 2.8, 4.6), "_additive_gradient": (0.5, 5.6, 7.8)}
SHORT_INNER_LOOP = {"_forward": (0.5, 2.8, 5.9), "_additive_gradient": (0.5, 5.6, 10.2)}


def record_launches() -> list[tuple]:
    """Have launches recorded instead of made: kernel, arguments and options of each."""
    import triton

    launches = []

    def run(kernel, *args, grid, warmup, **options):
        launches.append((kernel, args, options))

    triton.runtime.jit.JITFunction.run = run
    return launches


def record(cases: list[tuple]) -> list[tuple]:
    """Run the backend with launches recorded: case, kernel, arguments and options of each."""
    launches, done = record_launches(), []
    for case in cases:
        run_case(case)
        done += [(case, *launch) for launch in launches]
        launches.clear()
    return done


def run_case(case: tuple, B: int = 2, H: int = 4, Tq: int = 200, Tk: int = 300) -> None:
    """Call the operators of a case, forward and backward."""
    import torch
    from attnfast.kernels import attention, copying, coverage

    dtype, score, extras = case
    wide = extras in ("few", "wide")  # values wider than a block; few rows for processors
    A, Dv = 256, 512 if wide else 128
    attention._processors = Mock(return_value=132 if extras == "few" else 1)
    if score in ("beam", "draws"):
        record_search(getattr(torch, dtype), score == "beam", extras == "all")
        return
    if score == "copying":
        logits = torch.zeros(B, Tq, 5000, dtype=getattr(torch, dtype))
        weights, gate = logits[..., :Tk], logits[..., 0]
        source = torch.zeros(B, Tk, dtype=torch.int64 if extras == "all" else torch.int32)
        ends = (logits, weights, source, gate)
        out, lse = copying.forward(copying.CopyInputs(*ends, 7, extras == "all"))
        copying.backward(copying.CopyBackward(out, *ends, lse, 7, extras == "all"))
        return
    if score == "coverage":
        record_coverage(coverage, (B, H, Tq, Tk, A, Dv), getattr(torch, dtype), extras == "all")
        return
    query, key, value = (
        torch.zeros(B, H, *size, dtype=getattr(torch, dtype))
        for size in ((Tq, A), (Tk, A), (Tk, Dv))
    )
    weight = None if score == "dot" else query.new_zeros(A)
    bias = mask = lengths = span = grad_weights = grad_lse = None
    columns = 0
    if extras == "span":
        columns = 257
        span = torch.zeros(1, 1, Tq, 2, dtype=torch.int64)
    W = columns or Tk
    weights = query.new_zeros((B, H, Tq, W), dtype=torch.float32)
    if extras in ("all", "span"):
        bias = query.new_zeros(H, 1, W).expand(B, H, Tq, W)
        mask = torch.ones(Tq, 1, dtype=torch.bool).expand(B, H, Tq, W)
        lengths = torch.tensor([Tk, 17])
        grad_weights, grad_lse = weights, weights[..., 0]
    call = attention.AttentionInputs(
        query, key, value, weight, bias, mask, lengths, span, columns, score=score,
        need_weights=bias is not None, need_statistics=extras == "span",
    )  # fmt: skip
    backward = attention.AttentionBackward(
        attention.forward(call).context, grad_weights, grad_lse, query, key, value, weight,
        lengths, span, columns, None, weights, None, 1.0, score, "softmax", True, True,
        bias is not None,
    )  # fmt: skip
    attention.backward(backward)


def record_search(dtype, beam: bool, every: bool) -> None:
    """Take one step of a search, of five hypotheses with every option, and make its outputs."""
    import torch

    from attnfast.ops import search_steps
    from attnfast.ops.search import SearchInputs

    B, H, Tk, T, V, K = 3, 16, 40, 20, 32_000, 5 if every else 1
    embedding, rows = torch.zeros(V, H, dtype=dtype), torch.zeros(B, Tk, H, dtype=dtype)
    options = {}
    if every:
        options |= {"no_repeat_ngram": 3, "coverage_penalty": 0.2, "length_bonus": 0.1}
        options |= {"prefix": torch.zeros(B, 3, dtype=torch.int64), "need_weights": True}
        options |= {"word_mask": torch.ones(1, V, dtype=torch.bool), "n_best": 3 if beam else K}
    if not beam:
        options |= {"numbers": torch.zeros(B, K, T, dtype=torch.float64)}
    call = SearchInputs(
        embedding, embedding, torch.full((B,), T), rows[:, 0],
        *(rows.new_zeros(3 * H, n * H) for n in (2, 1)), key=rows, value=rows, most=T, beam=K,
        end=3, begin=2, **options,
    )  # fmt: skip
    search = (search_steps._BeamSearch if beam else search_steps._Sampling)(call)
    search.continue_hypotheses(rows.new_zeros(B * K, V), rows.new_zeros(B * K, Tk))
    search.outputs()


def record_coverage(coverage, sizes: tuple, dtype, every: bool) -> None:
    """Run the backend's coverage_attention: See's feature, or every term at once."""
    import torch

    B, H, Tq, Tk, A, Dv = sizes
    query, key, value = (
        torch.zeros(B, H, *size, dtype=dtype) for size in ((Tq, A), (Tk, A), (Tk, Dv))
    )
    K, C, W = (32, 2, 31) if every else (1, 2, 1)
    filters, projection = torch.zeros(K, C, W), torch.zeros(A, K)
    bias = mask = lengths = penalty = rate = transition = state = grad = None
    weights, keys = torch.zeros(B, H, Tq, Tk), torch.zeros(B, H, Tk)
    if every:
        bias = query.new_zeros(H, 1, Tk).expand(B, H, Tq, Tk)
        mask = torch.ones(Tq, 1, dtype=torch.bool).expand(B, H, Tq, Tk)
        lengths, penalty, transition = torch.tensor([Tk, 17]), torch.ones(H), weights[..., 0]
        rate = state = keys
        grad = keys[..., 0].contiguous()
    for history, normalisation in (((filters, projection), "softmax"), ((None, None), "sigmoid")):
        moves = transition if normalisation == "softmax" else None
        terms = (*history, penalty, rate, moves, state, state)
        weight = query.new_zeros(A)
        call = coverage.CoverageInputs(
            query, key, value, weight, bias, mask, lengths, *terms, score="tanh",
            normalisation=normalisation,
        )  # fmt: skip
        context, _, last, _, log_weights, sigmoid_sum = coverage.forward(call)
        backward = coverage.CoverageBackward(
            context, weights if every else None, last if every else None, grad,
            None if moves is None else log_weights, query, key, value, weight, lengths, *terms,
            weights, log_weights, sigmoid_sum, 1.0, "tanh", normalisation, *[True] * 4,
        )  # fmt: skip
        coverage.backward(backward)


def describe(value, path, constants, attributes, specialize=True):
    """Return an argument's type as a launch would: 1 and None are constants, 16 may divide."""
    if isinstance(value, tuple):
        return tuple(describe(x, (*path, i), constants, attributes) for i, x in enumerate(value))
    assert value is not None or len(path) == 1, "Triton 3.6 compiles no tuple that contains None"
    if not specialize:
        assert isinstance(value, int)
        return "i32"
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if not isinstance(value, int) or value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, int):
        return "i32"
    types = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64", "int32": "i32"}
    types |= {"int64": "i64", "bool": "i1"}
    return "*" + types[str(value.dtype).removeprefix("torch.")]


def form_of(kernel, args: tuple, options: dict) -> tuple[dict, ...]:
    """Return a launch's arguments and options, and all on which its machine code depends."""
    names = kernel.arg_names
    values = dict(zip(names, args)) | {k: v for k, v in options.items() if k in names}
    launch = {k: v for k, v in options.items() if k not in names}
    constants, attributes, signature = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(names, kernel.params)):
        if parameter.is_constexpr:
            constants[(i,)], signature[name] = values[name], "constexpr"
        else:
            specialize = not parameter.do_not_specialize
            signature[name] = describe(values[name], (i,), constants, attributes, specialize)
    return values, launch, signature, constants, attributes


def compile_for(target: str) -> list[dict]:
    """Compile every recorded launch, each form once, and return the figures of its code.

    With the launch's own options. Products and sums must be said to be fused, not left to a default
    that differs between versions: unfused, the factored loop takes half as many instructions again.
    """
    import triton
    import triton.language as tl
    from attnfast.kernels import attention
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = TARGETS[target][0]
    few = [case for case in CASES if case[2] == "all"] + [("float32", "tanh", "span")]
    cases = CASES if target == "sm_90" else few
    attention.NVIDIA = tl.constexpr(backend == "cuda")
    figures, done = [], set()
    for case, kernel, args, options in record(cases):
        values, launch, signature, constants, attributes = form_of(kernel, args, options)
        assert launch["enable_fp_fusion"], f"{kernel.fn.__name__} leaves it to Triton's default"
        form = str((kernel.fn.__name__, signature, constants, attributes, launch))
        if form in done:
            continue
        done.add(form)
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, GPUTarget(*TARGETS[target]), launch)
        figure = {"kernel": kernel.fn.__name__, "case": "-".join(case), "target": target}
        figure["score"] = values.get("SCORE")
        if "BR" in values:
            figure["row"] = values["BR"] / (TARGETS[target][2] * launch["num_warps"])
        if backend == "hip":
            spills = re.findall(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
            figures.append(figure | {"spills": sum(map(int, spills))})
            continue
        # The largest tile's two sides: what one thread holds of it.
        sides = ("BQ", "BK") if kernel.fn.__name__ == "_forward" else ("BX", "BA")
        if all(side in values for side in sides):
            threads = 32 * launch["num_warps"]
            figure["tile"] = values[sides[0]] * values[sides[1]] / threads
        figures.append(figure | machine_code(compiled.asm["cubin"]))
    return figures


def count_codes() -> dict[str, int]:
    """Count the machine codes of each kernel over batches of random lengths."""
    launches, draw, codes = record_launches(), random.Random(0), {}
    for score in ("tanh", "copying", "coverage"):
        for _ in range(60):
            Tq, Tk = draw.randint(3, 60), draw.randint(3, 60)
            run_case(("float32", score, "few"), B=32, H=1, Tq=Tq, Tk=Tk)
    for kernel, args, options in launches:
        form = str(form_of(kernel, args, options)[1:])
        codes.setdefault(kernel.fn.__name__, set()).add(form)
    return {kernel: len(forms) for kernel, forms in codes.items()}


def run_apart(argument: str):
    """Run this file in a process of its own: here Triton's interpreter may be switched on."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, __file__, argument]
    process = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def figures(request) -> list[dict]:
    """The figures of the targets that tests are about, those that name none about sm_90."""
    asked = [item.name for item in request.session.items if "figures" in item.fixturenames]
    about = {next((x for x in TARGETS if x in name), "sm_90") for name in asked}
    targets = [x for x in TARGETS if x in about]
    with ThreadPoolExecutor(2) as pool:
        return [figure for figures in pool.map(run_apart, targets) for figure in figures]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spilling(figures, target):
    mine = [x for x in figures if x["target"] == target]
    assert {x["kernel"] for x in mine} == set(KERNELS)
    assert not [x for x in mine if x["spills"] > STACK_OF.get(x["kernel"], STACK)]


def test_no_two_warps_hold_an_element_of_a_row(figures):
    """Or one would load what the other has stored in its place (see kernels/coverage.py)."""
    rows = [x["row"] for x in figures if x["kernel"].startswith("_scan")]
    assert rows and min(rows) >= 1


def test_machine_codes_do_not_depend_on_lengths():
    codes = run_apart("count")
    assert codes.keys() == CODES.keys()
    assert all(codes[kernel] <= most for kernel, most in CODES.items()), codes


@pytest.mark.parametrize("kernel", KERNELS)
def test_registers(figures, kernel):
    mine = {
        x["case"]: x["registers"]
        for x in figures
        if x["kernel"] == kernel and x["target"] == "sm_90"
    }
    assert mine
    assert max(mine.values()) <= REGISTERS[kernel], mine


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", INNER_LOOP)
def test_instructions_of_the_factored_loop(figures, kernel, target):
    checked = 0
    for figure in figures:
        if (figure["kernel"], figure["target"]) != (kernel, target):
            continue
        if not figure["case"].startswith("float32-tanh") or figure["score"] == "sums":
            continue
        elements, mix = factored_loop(figure["loops"])
        assert elements % figure["tile"] == 0, "not the loop over the tile's features"
        most = SHORT_INNER_LOOP if figure["case"].endswith(("span", "few", "wide")) else INNER_LOOP
        assert all(a <= b for a, b in zip(mix, most[kernel])), mix
        checked += 1
    assert checked


if __name__ == "__main__":
    json.dump(count_codes() if sys.argv[1] == "count" else compile_for(sys.argv[1]), sys.stdout)
