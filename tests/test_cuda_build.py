"""CUDA without a GPU: the kernels under sanitizers, and what the compiler makes of them."""

import os
import re
import shutil
import subprocess

import pytest
from test_cuda import HOST, compile_on_host

#: Registers of a thread and bytes of shared memory of a block, at most, on every architecture.
BUDGETS = {
    f"{kernel}<{dtype}{score}": (registers, kib * (2 if dtype == "double" else 1) << 10)
    for dtype in ("float", "double", "__half", "__nv_bfloat16")
    for kernel, score, registers, kib in (
        ("forward", ", 0>", 255, 16),  # two blocks on a multiprocessor; the others three and four
        ("forward", ", 1>", 168, 16),
        ("forward", ", 2>", 168, 16),
        ("step", ", 0>", 96, 5),
        ("step", ", 1>", 104, 5),
        ("step", ", 2>", 104, 5),
        ("step_backward", ", 0>", 104, 5),
        ("step_backward", ", 1>", 104, 5),
        ("step_backward", ", 2>", 104, 5),
        ("combine", ">", 64, 0),
        ("grad_score", ">", 168, 12),
        ("grad_rows", ", 0>", 128, 14),
        ("grad_rows", ", 1>", 168 if dtype == "double" else 128, 14),
        ("grad_rows", ", 2>", 168 if dtype == "double" else 128, 14),
    )
} | {"find_rows_of_keys": (40, 0)}
BUDGETS |= {
    f"{kernel}<{dtype}{score}>": (168, kib * (2 if dtype == "double" else 1) << 10)
    for dtype in ("float", "double", "__half", "__nv_bfloat16")
    for kernel, score, kib in (
        ("products", ", 0", 12),
        ("products", ", 1", 12),
        ("scan", "", 1),
        ("scan_backward", "", 5),
    )
}
BUDGETS |= {
    f"{kernel}<{dtype}>": (80, 128)
    for kernel in ("distribution", "distribution_gradient")
    for dtype in ("float", "double", "__half", "__nv_bfloat16")
}


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers(sanitizer, tmp_path):
    """No race and no access outside a tensor, over two tiles of everything."""
    flags = ("-O1", "-g", f"-fsanitize={sanitizer}")
    program = compile_on_host("sanitize.cpp", tmp_path / "sanitize", *flags)
    options = {"TSAN_OPTIONS": "halt_on_error=1"}
    for sizes in (
        "1 1 17 66 66 33 0 8", "1 1 40 70 8 8 5 8", "2 2 3 5 1 1 0 8", "1 1 3 0 4 4 0 8",
        "1 1 2 3 0 0 2 8", "2 1 1 150 9 40 0 8", "1 1 1 150 8 8 70 8", "1 1 3 140 0 4 0 8",
        "2 1 1 130 8 0 0 8", "1 1 1 530 8 8 0 8", "1 1 1 40 8 8 0 8", "1 1 1 70 8 1100 0 8",
        "1 1 2 130 8 8 0 8", "1 1 1 150 8 8 0 1", "1 1 2 300 8 8 0 2",
    ):  # fmt: skip
        done = subprocess.run(
            [program, *sizes.split()], env={**os.environ, **options}, text=True, capture_output=True
        )
        assert done.returncode == 0, (
            f"B H Tq Tk A Dv W blocks = {sizes}\n{done.stdout}{done.stderr[:4000]}"
        )


def test_registers_and_shared_memory(tmp_path):
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    archs = ("80", "90", "100")
    done = subprocess.run(
        [
            nvcc, "-std=c++20", "-O3", "-ftz=true", "-fatbin", "--threads", "3", "-Xptxas", "-v",
            *[f"-gencode=arch=compute_{x},code=sm_{x}" for x in archs],
            str(HOST / "kernels.cu"), "-o", str(tmp_path / "kernels.fatbin"),
        ],
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = subprocess.run(["c++filt"], input=done.stderr, text=True, capture_output=True).stdout
    said = said.replace("attnfast::(anonymous namespace)::", "").replace("(Score)", "")
    seen = set()
    for kernel in said.split("Compiling entry function ")[1:]:
        name, arch = re.match(r"'(?:void )?([\w<>, ]+)\(.*?' for '(\w+)'", kernel).groups()
        registers = int(re.search(r"Used (\d+) registers", kernel).group(1))
        shared = re.search(r"(\d+) bytes smem", kernel)
        shared = int(shared.group(1)) if shared else 0
        most = BUDGETS[name]
        where = f"{name} on {arch}: {registers} registers, {shared} bytes of shared memory"
        assert " 0 bytes spill stores, 0 bytes spill loads" in kernel, where
        if not name.endswith("<double, 1>"):  # eight of its tanh at a place would be too much code
            assert " 0 bytes stack frame" in kernel, f"{where}, arrays in memory"
        assert all(a <= b for a, b in zip((registers, shared), most)), f"{where}; at most {most}"
        seen.add((name, arch))
    assert seen == {(name, f"sm_{arch}") for name in BUDGETS for arch in archs}
