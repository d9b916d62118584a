"""CUDA without a GPU: the kernels run on the host against the oracle, and compile without spills.

On a GPU the backend ``cuda`` takes part in test_attention.py like every other.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import table
import test_attention
import test_copying
import test_memory
import test_span
import torch
from table import Case, cases, fuzz

import attnfast.memory
import attnfast.ops.attention
import attnfast.ops.copying

ROOT = Path(__file__).parent.parent
HOST = ROOT / "tests" / "cuda_host"
FMA = torch.backends.cpu.get_cpu_capability().startswith("AVX")

#: Registers of a thread and bytes of shared memory of a block, at most, on every architecture.
BUDGETS = {
    f"{kernel}<{dtype}{score}": (registers, kib * (2 if dtype == "double" else 1) << 10)
    for dtype in ("float", "double", "__half", "__nv_bfloat16")
    for kernel, score, registers, kib in (
        ("forward", ", 0>", 255, 16),  # two blocks on a multiprocessor; the others three and four
        ("forward", ", 1>", 168, 16),
        ("step", ", 0>", 96, 1),
        ("step", ", 1>", 128, 1),
        ("combine", ">", 64, 0),
        ("grad_score", ">", 168, 12),
        ("grad_rows", ", 0>", 128, 14),
        ("grad_rows", ", 1>", 168 if dtype == "double" else 128, 14),
    )
} | {"find_rows_of_keys": (40, 0)}
BUDGETS |= {
    f"{kernel}<{dtype}>": (80, 64)
    for kernel in ("distribution", "distribution_gradient")
    for dtype in ("float", "double", "__half", "__nv_bfloat16")
}


def compile_on_host(source: str, out: Path, *flags: str) -> Path:
    """Compile with g++ against the shim that stands in for CUDA's headers."""
    cxx = os.environ.get("CXX") or "g++"
    if not shutil.which(cxx):
        pytest.skip(f"there is no C++ compiler {cxx}")
    command = [cxx, "-std=c++20", "-O2", "-pthread", f"-I{HOST}", str(HOST / source)]
    command += ["-ffp-contract=fast", *(["-mfma"] if FMA else [])]  # as nvcc contracts
    subprocess.run([*command, *flags, "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Register the kernels for CPU tensors under the name that they have on a GPU."""
    torch_folder = Path(torch.__file__).parent
    out = compile_on_host(
        "library.cpp", tmp_path_factory.mktemp("cuda") / "library.so", "-shared", "-fPIC",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{torch_folder}/include",
        f"-L{torch_folder}/lib", "-ltorch_cpu",
    )  # fmt: skip
    torch.ops.load_library(str(out))


@pytest.fixture
def host(library, monkeypatch):
    """Let backend="cuda" run on CPU tensors; return its name."""
    for module in (attnfast.ops.attention, attnfast.ops.copying, attnfast.memory):
        monkeypatch.setattr(module, "choose", lambda *_: "cuda")
    monkeypatch.setitem(table.DEVICE, "cuda", table.CPU)
    return "cuda"


def tiles(case: Case) -> float:
    """Blocks of threads that a case takes, about."""
    return case.B * (case.H or 1) * (1 + case.Tq / 16) * (1 + case.Tk / 32)


SMALL = [case for case in cases() if tiles(case) < 45 and case.elements < 1e6]
WIDE = Case("additive", 1, 18, 66, 70, 530, terms=("mask",), layout="sliced")


@pytest.mark.parametrize("case", [*SMALL, WIDE], ids=test_attention.name)
def test_table(case, host):
    test_attention.judge(case, host)


@pytest.mark.parametrize("seed", range(2))
def test_fuzz(seed, host):
    for case in [case for case in fuzz(seed, 32, 100_000) if tiles(case) < 20][:8]:
        test_attention.judge(case, host)


SPANS = [x for x in test_span.cases() if tiles(x[0]) < 20 and x[0].seed % 8 in (0, 2, 3)]


@pytest.mark.parametrize(("case", "span", "position"), SPANS, ids=test_span.name)
def test_spans(case, span, position, host):
    test_span.judge(case, span, position, host)


def test_a_row_ends_with_its_columns(host):
    test_span.test_a_row_ends_with_its_columns(host)


@pytest.mark.parametrize("case", test_copying.copies(), ids=str)
def test_copying_table(case, host):
    test_copying.check(case, host)


def test_copying_fuzz(host):
    for case in test_copying.fuzz(0, 24):
        test_copying.check(case, host)


@pytest.mark.parametrize("case", test_memory.CASES, ids=str)
def test_recurrent_decoder(case, host):
    test_memory.judge(case, host)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_what_every_backend_owes(score, host):
    """The properties that test_attention.py asks of every backend, by name."""
    test_attention.test_empty_rows(score, (4, 70, 8, 8), host)
    for by in ("mask", "bias"):
        test_attention.test_what_is_not_seen_changes_nothing(by, score, (5, 40, 16, 8), host)
    test_attention.test_a_row_is_not_touched_by_what_others_see(score, (3, 20, 16, 8), host)
    test_attention.test_offsets_past_two_to_the_31(score, host)
    test_attention.test_results_do_not_depend_on_what_is_asked(host)
    test_attention.test_half_inputs_of_256(host)
    test_attention.test_scale_multiplies_the_query((3, 5, 8, 8), ("bias",), host)


@pytest.mark.parametrize("factor", [1e4, -5e4])
def test_large_scores(factor, host):
    test_attention.test_large_scores(factor, host)


@pytest.mark.parametrize(
    ("q", "k"), [(8.0, 8.0), (18.0, 18.0), (21.7, -21.7), (-300.0, 299.5), (1e30, 1.0)]
)
def test_factored_domain(q, k, host):
    test_attention.test_factored_domain(q, k, host)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers(sanitizer, tmp_path):
    """No race and no access outside a tensor, over two tiles of everything."""
    flags = ("-O1", "-g", f"-fsanitize={sanitizer}")
    program = compile_on_host("sanitize.cpp", tmp_path / "sanitize", *flags)
    options = {"TSAN_OPTIONS": "halt_on_error=1"}
    for sizes in (
        "1 1 17 66 66 33 0", "1 1 40 70 8 8 5", "2 2 3 5 1 1 0", "1 1 3 0 4 4 0", "1 1 2 3 0 0 2",
        "2 1 1 150 9 40 0", "1 1 1 150 8 8 70",
    ):  # fmt: skip
        done = subprocess.run(
            [program, *sizes.split()], env={**os.environ, **options}, text=True, capture_output=True
        )
        assert done.returncode == 0, (
            f"B H Tq Tk A Dv W = {sizes}\n{done.stdout}{done.stderr[:4000]}"
        )


# ---- the compiler --------------------------------------------------------------------------------


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
        assert all(a <= b for a, b in zip((registers, shared), most)), f"{where}; at most {most}"
        seen.add((name, arch))
    assert seen == {(name, f"sm_{arch}") for name in BUDGETS for arch in archs}
