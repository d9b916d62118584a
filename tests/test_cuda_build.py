"""CUDA without a GPU: the kernels under sanitizers, and what the compiler makes of them."""

import functools
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
from machine_code import (
    additive_loop,
    clocks,
    factored_loop,
    functions,
    load_rounds,
    loops,
    plain,
    resources,
    run_tool,
    scheduled_loops,
)
from test_cuda_on_host import compile_on_host

import attnfast
from attnfast.ops.arguments import SCORES

ARCHS = ("80", "90", "100")
DTYPES = ("float", "double", "__half", "__nv_bfloat16")
#: Registers of a thread and bytes of shared memory of a block, at most, on every architecture. With
#: 168 registers three blocks are on a multiprocessor, with 128 four, with 96 five, with 80 six.
BUDGETS = {
    f"{kernel}<{dtype}{score}>": (
        of_double if dtype == "double" else registers,
        kib * (2 if dtype == "double" else 1) << 10,
    )
    for dtype in DTYPES
    for kernel, score, registers, of_double, kib in (
        *(("forward", f", {score}, {columns}", registers, of_double, 35 if score == 1 else 20)
          for score in range(len(SCORES))
          for columns, registers, of_double in ((1, 128, 255), (2, 168, 255), (4, 168, 0))),
        *(("step", f", {score}", 168, 168, 5) for score in range(len(SCORES))),
        *(("step_backward", f", {score}, false", 168, 240, 5) for score in range(len(SCORES))),
        *(("step_backward", f", {score}, true", 168, 255, 1) for score in range(len(SCORES))),
        ("combine", "", 80, 128, 1),
        ("combine_backward", "", 64, 80, 1),
        ("factor", "", 80, 0, 0),
        ("products", ", 0, true", 168, 240, 16),
        *(("products", f", {score}, false", 168, 240, 32 if score == 1 else 16)
          for score in range(len(SCORES))),
        ("grad_score", "", 64, 80, 1),
        *((x, "", 64, 80, 1) for x in ("normalise", "drop_hidden") if dtype in ("float", "double")),
        ("grad_rows", ", 0, false", 96, 200, 23),
        ("grad_rows", ", 0, true", 96, 200, 23),
        ("grad_rows", ", 1, false", 168, 200, 23),
        ("grad_rows", ", 1, true", 128, 200, 23),
        *(("grad_rows", f", {score}, false", 168, 216, 23) for score in range(2, len(SCORES))),
        *(("grad_rows", f", {score}, true", 128, 216, 23) for score in range(2, len(SCORES))),
        ("scan", "", 168, 168, 5),
        ("scan_backward", ", false", 168, 255, 5),
        ("scan_backward", ", true", 168, 255, 5),
        ("distribution", "", 80, 128, 1),
        ("distribution_gradient", "", 80, 128, 1),
    )
    if dtype != "double" or of_double
} | {
    "sort_keys": (40, 0),
    "find_rows_of_keys": (40, 0),
    "put_lengths_of_steps": (40, 0),
    **{
        f"{kernel}<{dtype}{cell}>": (64, 0)
        for dtype in DTYPES[:2]
        for kernel, cells in (
            ("cell_step", 3), ("cell_step_backward", 3), ("reach_first", 0),
            ("attentional_backward", 0), ("clear_padding", 0), ("cover_steps", 0),
            ("copy_state", 0), ("multiply_mask", 0), ("gate_contexts", 0), ("gate_backward", 0),
        )
        for cell in ([f", {x}" for x in range(cells)] or [""])
    },
    "persistent_forward": (128, 0),  # 512 threads; the launch chooses the shared memory
    "persistent_backward": (128, 0),
    "feed<float>": (96, 16 << 10),
    "feed<double>": (168, 32 << 10),
}  # fmt: skip


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers(sanitizer, tmp_path):
    """No race and no access outside a tensor, over two tiles of everything."""
    flags = ("-O1", "-g1", f"-fsanitize={sanitizer}")
    program = compile_on_host("sanitize.cpp", tmp_path / "sanitize", *flags)
    options = {"TSAN_OPTIONS": "halt_on_error=1"}
    nothing = ("1 1 3 0 4 4 0 8", "1 1 2 3 0 0 2 8", "1 1 3 140 0 4 0 8", "2 1 1 130 8 0 0 8")
    for sizes in (
        "1 1 17 66 66 33 0 8", "1 1 40 70 8 8 5 8", "2 2 3 5 1 1 0 8", "2 1 1 150 9 40 0 8",
        "1 1 1 150 8 8 70 8", "1 1 1 530 8 8 0 8", "1 1 1 40 8 8 0 8", "1 1 1 70 8 1100 0 8",
        "1 1 2 130 8 8 0 8", "1 1 1 150 8 8 0 1", "1 1 2 300 8 8 0 2", "1 1 17 40 8 600 0 8",
        *(nothing if sanitizer == "address" else ()),
    ):  # fmt: skip
        done = subprocess.run(
            [program, *sizes.split()], env={**os.environ, **options}, text=True, capture_output=True
        )
        assert done.returncode == 0, (
            f"B H Tq Tk A Dv W blocks = {sizes}\n{done.stdout}{done.stderr[:4000]}"
        )


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("triton", reason="triton, which brings the disassembler, is not installed")
    library = Path(attnfast.__file__).with_name("_C_cuda.so")
    if not library.exists():
        pytest.skip("_C_cuda.so was not built: make test builds it where there is nvcc")
    return library


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """The machine code in the library, in files."""
    folder = tmp_path_factory.mktemp("kernels")
    run_tool("cuobjdump", library, "-xelf", "all", cwd=folder)
    return folder


@pytest.fixture(params=ARCHS)
def arch(request, folder):
    if request.param not in built(folder):
        pytest.skip(f'not built for sm_{request.param}: make test ARCHS="8.0 9.0 10.0"')
    return request.param


def built(folder: Path) -> list[str]:
    """The architectures of which there is machine code."""
    return [arch for arch in ARCHS if [*folder.glob(f"*.sm_{arch}.cubin")]]


@functools.cache
def code(folder: Path, arch: str) -> dict[str, str]:
    """The instructions of every function, by its plain name, as nvdisasm prints them with -hex."""
    cubins = folder.glob(f"*.sm_{arch}.cubin")
    return {plain(k): v for x in cubins for k, v in functions(x, "-hex").items()}


def test_the_newest_architecture_has_ptx(library, folder):
    listed = run_tool("cuobjdump", library, "-lptx")
    assert set(re.findall(r"\.sm_(\d+)\.ptx", listed)) == {built(folder)[-1]}


def test_registers_and_shared_memory(folder, arch):
    seen = set()
    cubins = folder.glob(f"*.sm_{arch}.cubin")
    for mangled, usage in itertools.chain.from_iterable(map(resources, cubins)):
        name = plain(mangled)
        assert usage["LOCAL"] == 0, f"{name} has arrays in memory"
        spills = 16 if name.startswith("persistent") else 8 if arch == "100" else 0
        assert usage["STACK"] <= spills, f"{name} spills {usage['STACK']} bytes"
        if usage["STACK"]:
            inner = [x for x in scheduled_loops(code(folder, arch)[name]) if len(x) < 1000]
            codes = {x.code[:3] for loop in inner for x in loop}
            assert not codes & {"LDL", "STL"}, f"{name} spills in a loop"
        system = 0 if arch == "80" else 1024  # bytes of every block that it keeps from sm_90 on
        used = usage["REG"], usage["SHARED"] - system
        assert all(a <= b for a, b in zip(used, BUDGETS[name])), f"{name}: {used}"
        seen.add(name)
    assert seen == set(BUDGETS)


#: In the inner loops, at most: special functions, float32 instructions and all instructions for a
#: (query, key, feature) of the additive score; and of products all instructions for a
#: multiply-add, in the best loop.
FACTORED_LOOPS = {
    "forward<float, 1, 4>": (0.5, 2.5, 3.5),
    "products<float, 1, false>": (0.5, 2.5, 3.5),
    "grad_rows<float, 1, false>": (0.5, 5.5, 6.6),
    "grad_rows<float, 1, true>": (0.5, 4.5, 5.6),
}
PRODUCTS = {
    "forward<float, 0, 4>": 1.45,
    "products<float, 0, true>": 1.45,
    "grad_rows<float, 0, false>": 1.6,
    "grad_rows<float, 0, true>": 1.6,
}


def test_instructions_of_inner_loops(folder, arch):
    found = {name: loops(code(folder, arch)[name]) for name in (*FACTORED_LOOPS, *PRODUCTS)}
    for name, most in FACTORED_LOOPS.items():
        _, mix = factored_loop(found[name])
        assert all(a <= b for a, b in zip(mix, most)), f"{name}: {mix}"
    for name, most in PRODUCTS.items():
        best = min(x["all"] / x["float32"] for x in found[name] if x["float32"] >= 16)
        assert best <= most, f"{name}: {best}"


#: Warps of a scheduler, as many as fit, and the clocks that it takes at most for a (query, key,
#: feature) of the additive score in the inner loop, by the model of machine_code.py. Half a special
#: function takes four.
CLOCKS = {
    "forward<float, 1, 1>": (4, 4.8),
    "forward<float, 1, 2>": (3, 4.5),
    "forward<float, 1, 4>": (3, 5.1),
    "products<float, 1, false>": (4, 4.3),
    "grad_rows<float, 1, false>": (3, 6.8),
    "grad_rows<float, 1, true>": (4, 5.7),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_of_inner_loops(name, folder):
    """Waiting for every reciprocal takes longer than all instructions of the loop."""
    sass = code(folder, "90").get(name) or pytest.skip("not built for sm_90")
    elements, loop = additive_loop(scheduled_loops(sass))
    warps, most = CLOCKS[name]
    assert clocks(loop, warps) / elements <= most


#: Of loops with this many global loads on sm_90: in how many rounds they begin, at most.
ROUNDS = {
    "forward<float, 0, 4>": {30: 1, 16: 1},
    "forward<float, 1, 4>": {16: 1},
    "products<float, 0, true>": {30: 1},
    "factor<float>": {20: 1},
    **{f"step<float, {score}>": {64: 2} for score in range(len(SCORES))},
    **{f"step_backward<float, {score}, false>": {40: 1, 32: 1} for score in range(len(SCORES))},
    **{
        f"step_backward<float, {score}, true>": {32: rounds}
        for score, rounds in enumerate((2, 2, 1, 1))
    },
    "combine<float>": {32: 1},
    "combine_backward<float>": {12: 1},
    "scan<float>": {20: 1},
    "distribution<float>": {16: 2},
    "distribution_gradient<float>": {32: 2},
    "scan_backward<float, false>": {8: 5, 16: 12, 32: 8, 72: 17},
}


def test_features_are_copied_while_others_are_added(folder):
    """A warp waits for all its copies but the last group."""
    found = code(folder, "90") or pytest.skip("not built for sm_90")
    for name in ("forward<float, 1, 4>", "products<float, 1, false>"):
        loops = [[x.code for x in loop] for loop in scheduled_loops(found[name])]
        codes = next(loop for loop in loops if "LDGDEPBAR" in loop)
        assert sum(x.startswith("LDGSTS") for x in codes) == 7
        assert codes.index("LDGDEPBAR") < codes.index("DEPBAR.LE") < codes.index("MUFU.RCP")


def test_relu_takes_one_instruction(folder, arch):
    for name in ("forward<float, 2, 4>", "products<float, 2, false>"):
        assert code(folder, arch)[name].count("FMNMX.NAN") >= 32


def test_loads_of_a_loop_are_under_way_together(folder):
    """A load that waits for another takes the latency of memory again: a branch is enough."""
    found = code(folder, "90")
    if not found:
        pytest.skip("not built for sm_90")
    for name, most in ROUNDS.items():
        loops = [load_rounds(loop) for loop in scheduled_loops(found[name])]
        for loads, allowed in most.items():
            rounds = [x for n, x in loops if n == loads]
            assert rounds, f"{name} has no loop of {loads} loads: {loops}"
            assert max(rounds) <= allowed, f"{name}: {loads} loads in {max(rounds)} rounds"
