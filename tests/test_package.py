"""The package as installed: what it imports, what it names, what it does without its parts."""

import ast
import functools
import importlib
import inspect
import os
import pkgutil
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

import attnfast
from attnfast.integrations.registry import PROJECTS
from attnfast.ops import backends
from attnfast.ops.backends import load_library, unsupported_reason

ROOT = Path(__file__).parent.parent
CARD = backends.DispatchKey(torch.device("cuda", 0), torch.float32)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**env, **environment},
        capture_output=True,
        text=True,
        cwd="/",
    )


@pytest.mark.parametrize("module", ["attnfast", "attnfast.models", "attnfast.translate.cli"])
def test_import_is_light(module):
    """Importing adds no other package to torch, and nothing of torch's compiler."""
    code = (
        "import sys, torch; before = set(sys.modules);"
        f"import {module}; new = set(sys.modules) - before;"
        "print(sorted({x.partition('.')[0] for x in new} - set(sys.stdlib_module_names)),"
        "sorted(x for x in new if x.startswith(('torch._dynamo', 'torch._inductor'))))"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['attnfast'] []"


def test_the_cpu_library_loads_where_it_was_built():
    """A library that is there but does not load would only skip the tests of its backend."""
    if not Path(attnfast.__file__).with_name("_C_cpu.so").exists():
        pytest.skip("_C_cpu.so was not built")
    assert load_library("_C_cpu") is None
    assert unsupported_reason("cpu", torch.device("cpu"), torch.float32) is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch loads it by itself")
def test_the_cuda_library_finds_its_symbols(tmp_path):
    """With a stand-in for what a CUDA torch would have loaded it loads and registers."""
    if not (Path(attnfast.__file__).parent / "_C_cuda.so").exists():
        pytest.skip("_C_cuda.so was not built")
    stand_in = tmp_path / "libtorch_cuda.so"
    source = """extern "C" {
        int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }
        int aoti_torch_cuda_addmm_out(void*, void*, void*, void*, double, double) { return 1; }
        int aoti_torch_cuda_baddbmm_out(void*, void*, void*, void*, double, double) { return 1; }
    }"""
    command = [os.environ.get("CXX") or "g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", stand_in]
    subprocess.run([*command, f"-Wl,-soname,{stand_in.name}"], input=source, text=True, check=True)
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    folder = Path(nvcc or tmp_path / "bin" / "nvcc").resolve().parent.parent
    runtime = next(folder.rglob("libcudart.so.*"), None)
    if runtime is None:
        pytest.skip("CUDA's runtime is not here")
    done = python(f"""if True:
        import ctypes, torch, attnfast
        for library in ({str(runtime)!r}, {str(stand_in)!r}):
            ctypes.CDLL(library)
        from attnfast.ops.backends import load_library
        print(load_library("_C_cuda"))
        names = [x for x in torch._C._dispatch_get_all_op_names() if x.startswith("attnfast_cuda:")]
        assert len(names) > 6, names
        for name in names:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
        print(attnfast.ops.backends.architectures())
    """)
    assert done.returncode == 0, done.stdout + done.stderr
    failure, built = done.stdout.splitlines()
    assert failure == "None"
    assert {(9, 0)} <= set(ast.literal_eval(built)) <= {(8, 0), (9, 0), (10, 0)}


@pytest.mark.parametrize("name", ["_C_cpu", "_C_cuda"])
def test_libraries_need_only_the_stable_abi(name):
    """And no newer torch than the package does."""
    torch_abi_audit = pytest.importorskip("torch_abi_audit")
    library = Path(attnfast.__file__).with_name(f"{name}.so")
    if not library.exists():
        pytest.skip(f"{name}.so was not built")
    found = torch_abi_audit.inspect_extension(library).torch
    assert found.uses_torch and found.stable, found
    assert found.min_torch_version == "2.10.0"


def emulate_avx512(folder: Path) -> None:
    """Copy the package, its CPU library replaced: AVX-512's kernels, compiled for AVX2."""
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    if platform.machine() not in ("x86_64", "AMD64") or shutil.which(cxx[0]) is None:
        pytest.skip("this processor has no AVX-512, and none can be emulated")
    package, source = folder / "attnfast", ROOT / "csrc" / "cpu"
    shutil.copytree(Path(attnfast.__file__).parent, package, ignore=shutil.ignore_patterns("*.so"))
    torch_folder = Path(torch.__file__).parent
    common = [*cxx, "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-c"]
    launcher = ["-O1", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{torch_folder}/include"]
    kernel = ["-O3", "-DVARIANT=avx512", "-mavx2", "-mfma", "-include", ROOT / "tests" / "avx512.h"]
    names, objects = [], []
    for unit in sorted(source.glob("*.cpp")):
        objects.append(folder / f"{unit.stem}.o")
        flags = kernel if unit.stem.endswith("_kernel") else launcher
        subprocess.run([*common, *flags, unit, "-o", objects[-1]], check=True)
        if unit.stem.endswith("_kernel"):  # its table, one for all instruction sets
            operator = unit.stem.removesuffix("_kernel")
            symbol = f"_ZN8attnfast{{}}{len(operator)}{operator}E".format
            for variant in ("8portable", "4avx2"):
                names.append(f"-Wl,--defsym={symbol(variant)}={symbol('6avx512')}")
    subprocess.run(
        [*cxx, "-shared", *objects, *names,
         f"-L{torch_folder}/lib", "-ltorch_cpu", "-o", package / "_C_cpu.so"],
        check=True,
    )  # fmt: skip


@functools.cache
def instruction_sets() -> list[str]:
    """Return those of this processor, the best first."""
    probe = "import torch, attnfast; x = torch.ones(1, 1, 1); attnfast.dot_attention(x, x, x)"
    return [
        x
        for x in ("avx512", "avx2", "portable")
        if "must be portable" not in python(probe, ATTNFAST_CPU_ISA=x).stderr
    ]


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set(isa, tmp_path):
    """The CPU's tests again with its kernels forced to an instruction set, AVX-512 also emulated.

    The best that this processor has is what all other tests run. Emulation is slow: no fuzz there.

    The portable one has no fused multiply-adds on x86, nor then has the eager code to compare with.
    No fuzz there either: on one row with scores of ±100 the last bit of the largest decides.
    """
    selection = "(test_table or test_factored or int8 or fuzz) and cpu"
    env = {"ATTNFAST_CPU_ISA": isa}
    has = instruction_sets()
    if isa == has[0]:
        pytest.skip("all other tests run it")
    if isa not in has:
        if isa != "avx512":
            pytest.skip(f"this processor has no {isa}")
        emulate_avx512(tmp_path)
        env, selection = {"PYTHONPATH": str(tmp_path)}, f"{selection} and not fuzz"
    if isa == "portable":
        selection += " and not fuzz"
        env |= {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    tests, names = ROOT / "tests", ("attention", "memory", "coverage", "copying", "search")
    if isa == "portable":
        names = ("attention", "coverage", "search")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection,
         *(tests / f"test_{name}.py" for name in names)],
        cwd=tests,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 80


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_on_one_thread():
    """Its parent's threads are not there: more of them would be waited for, as PyTorch's are."""
    decoder = attnfast.nn.AttentionGRU(8, 8, 8, attnfast.nn.BahdanauAttention(8, 8, 8))
    source, target = torch.randn(32, 50, 8), torch.randn(32, 20, 8)
    wanted = decoder(target, decoder.prepare(source))[0]
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        found = decoder(target, decoder.prepare(source))[0]
        os._exit(0 if torch.allclose(found, wanted, atol=1e-5) else 1)
    ends = time.monotonic() + 60
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
        time.sleep(0.01)
    if not done[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_works_without_the_compiled_library():
    """The oracle runs instead, and says so once."""
    code = (
        "import pathlib, torch, warnings; exists = pathlib.Path.exists;"
        "pathlib.Path.exists = lambda p: not p.name.startswith('_C_') and exists(p);"
        "import attnfast; x = torch.randn(2, 3, 4);"
        "warnings.simplefilter('always');"
        "print(attnfast.dot_attention(x, x, x)[0].shape, attnfast.dot_attention(x, x, x)[1])"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 3, 4]) None" in done.stdout
    assert done.stderr.count("attnfast runs on its reference implementation") == 1
    assert "install attnfast again with a C++ compiler that works" in done.stderr


def test_info_needs_no_optional_package():
    blocked = "('sentencepiece', 'sacrebleu', 'tqdm', 'matplotlib', 'triton', 'numpy')"
    code = (
        f"import sys; sys.modules.update({{m: None for m in {blocked}}});"
        "from attnfast.translate.cli import main; main(['info'])"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^reference +on$", done.stdout, re.MULTILINE)
    assert re.search(r"^triton +off: ", done.stdout, re.MULTILINE)


def test_kernels_shadow_no_other_package(tmp_path):
    """Hugging Face's transformers, for one, look for a package of this name."""
    here = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}];"
    names = "'__file__', '__version__'"
    done = python(f"{here} import kernels; print([x for x in ({names}) if hasattr(kernels, x)])")
    assert done.stdout.strip() == "[]", done.stderr
    for use in ("from kernels import get_kernel", "import kernels; kernels.get_kernel"):
        done = python(f"{here} {use}")
        assert "ImportError: no get_kernel in kernels: these are attnfast's Triton" in done.stderr
        assert "importable as attnfast.kernels only" in done.stderr
    assert (
        "No module named 'kernels.attention'" in python(f"{here} import kernels.attention").stderr
    )
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from .layers import get_kernel")
    (tmp_path / "kernels" / "layers.py").write_text("get_kernel = 3")
    use = "import kernels; from kernels import get_kernel; print(get_kernel, kernels.__file__)"
    done = python(f"{here} {use}; import attnfast.kernels.attention")
    assert done.stdout.split() == ["3", str(tmp_path / "kernels" / "__init__.py")], done.stderr


def public():
    """Yield every public function, class and method of the modules meant for users."""
    for info in pkgutil.walk_packages(attnfast.__path__, "attnfast."):
        adapters = info.name in {project.__name__ for project in PROJECTS}
        if adapters or re.search(r"__main__|kernels|_C_", info.name):
            continue
        module = importlib.import_module(info.name)
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != info.name:
                continue
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield f"{info.name}.{name}", thing


def test_every_public_name_is_documented():
    missing = [name for name, thing in public() if not inspect.getdoc(thing)]
    assert not missing


def test_docstrings_open_with_a_plain_clause():
    """They say what a thing is or does, not "what …", nor "the same" as a neighbour."""
    opens = r"(?:What|Whether|Of|The same)\b"
    package = Path(attnfast.__file__).parent
    for file in [*package.rglob("*.py"), *(ROOT / "kernels").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                assert not re.match(opens, ast.get_docstring(node) or ""), (file, ast.unparse(node))


@pytest.mark.parametrize(
    "name", ["additive_attention", "dot_attention", "coverage_attention", "copy_distribution"]
)
def test_operators_document_formula_and_paper(name):
    doc = inspect.getdoc(getattr(attnfast, name))
    for word in (".. math::", "Args:", "arXiv:"):
        assert word in doc


BUILD = [sys.executable, "setup.py", "-q", "build_ext"]


@pytest.fixture
def source(tmp_path):
    """A copy of the source to build in."""
    for part in ("attnfast", "kernels", "csrc"):
        shutil.copytree(
            ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.so", "kernels", "__pyc*")
        )
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def build(source, **environment):
    return subprocess.run(
        [*BUILD, "--build-lib", "out"],
        cwd=source,
        env={**os.environ, "ATTNFAST_BUILD_CUDA": "0", **environment},
        capture_output=True,
        text=True,
    )


def test_build_without_a_compiler(source):
    done = build(source, PATH="/nonexistent", CXX="")
    assert done.returncode == 0, done.stderr
    assert "_C_cpu not built: there is no C++ compiler" in done.stdout
    assert not list(source.glob("out/**/*.so"))
    done = build(source, CXX="nonexistent")
    assert "_C_cpu not built: there is no $CXX, nonexistent" in done.stdout


#: A compiler that is done at once: it says its arguments, and leaves an empty file where told.
COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


@pytest.fixture
def compilers(tmp_path):
    """Variables with which the build finds such compilers, and the file where they say what for."""
    for name in ("bin/c++", "bin/nvcc"):
        path = tmp_path / "fake" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMPILER.format(log=tmp_path / "compiled"))
        path.chmod(0o755)
    fake = tmp_path / "fake"
    return {"CXX": str(fake / "bin/c++"), "CUDA_HOME": str(fake)}, tmp_path / "compiled"


def test_the_build_says_what_it_compiles_and_does_so_once(source, compilers):
    environment, compiled = compilers
    printed = build(source, **environment).stdout.splitlines()
    count = len(compiled.read_text().splitlines())
    assert len([x for x in printed if re.match(r"\[\d+/\d+\] _C_cpu: ", x)]) == count
    assert re.search(r"built _C_cpu \(.*\)$", printed[-2])
    assert "_C_cuda not built: ATTNFAST_BUILD_CUDA is 0" in printed[-1]
    build(source, **environment)
    assert len(compiled.read_text().splitlines()) == count
    (source / "csrc/cpu/copying.cpp").touch()
    build(source, **environment)
    assert len(compiled.read_text().splitlines()) == count + 2  # compiled and linked
    build(source, **environment, ATTNFAST_CXXFLAGS="-g")
    assert len(compiled.read_text().splitlines()) > 2 * count  # the stub has no flags


def test_a_header_makes_its_units_outdated(source):
    """The compiler writes which headers a unit includes."""
    for name in ("one", "two"):
        (source / f"csrc/cpu/{name}.h").write_text("")
    for path in source.glob("csrc/cpu/*.cpp"):
        path.write_text('#include "one.h"\n' if path.stem == "linear" else '#include "two.h"\n')
    environment = {"ATTNFAST_BUILD_ISA": "portable"}
    counts = []
    for changed in (None, "one", "two"):
        if changed:
            (source / f"csrc/cpu/{changed}.h").write_text("int other;")
        printed = build(source, **environment).stdout
        counts.append(len(re.findall(r"_C_cpu: \w+\.o$", printed, re.MULTILINE)))
    assert counts == [10, 1, 9]


def fake_torch(folder, version, cuda=None):
    """Write as much of torch as the build looks at."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").write_text(f"__version__, cuda = {version!r}, {cuda!r}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("version", "wish", "built"), [("12.8", "", True), (None, "", False), (None, "1", True)]
)
def test_the_cuda_library_is_for_a_torch_with_cuda(source, compilers, version, wish, built):
    environment = fake_torch(source / "fake-torch", "2.13.0", version)
    environment |= {**compilers[0], "ATTNFAST_BUILD_CPU": "0"}
    done = build(source, **environment, ATTNFAST_BUILD_CUDA=wish)
    assert done.returncode == 0, done.stderr
    assert bool(list(source.glob("out/**/_C_cuda.so"))) == built
    if not built:
        assert "this torch is without CUDA (ATTNFAST_BUILD_CUDA=1 builds it" in done.stdout


@pytest.mark.parametrize(
    ("wanted", "codes"),
    [
        ("", "sm_80 sm_90 sm_100 compute_100"),
        ("9.0;8.0+PTX 12.0", "sm_80 sm_90 sm_120 compute_120"),
        ("9.0a", "sm_90 compute_90"),
        ("Hopper", None),
    ],
)
def test_the_newest_architecture_has_ptx(source, compilers, wanted, codes):
    environment = {**compilers[0], "ATTNFAST_BUILD_CPU": "0", "ATTNFAST_BUILD_CUDA": "1"}
    done = build(source, **environment, TORCH_CUDA_ARCH_LIST=wanted)
    if codes is None:
        assert "TORCH_CUDA_ARCH_LIST must be like 8.0 9.0, got 'Hopper'" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    units = [x for x in compilers[1].read_text().splitlines() if ".cu " in x]
    assert units
    for command in units:
        assert " ".join(re.findall(r",code=(\S+)", command)) == codes


@pytest.mark.parametrize(("isa", "message"), [("portable", None), ("avx9", "got 'avx9'")])
def test_a_library_for_one_instruction_set(source, compilers, isa, message):
    done = build(source, **compilers[0], ATTNFAST_BUILD_CUDA="0", ATTNFAST_BUILD_ISA=isa)
    if message:
        assert "ATTNFAST_BUILD_ISA must be one of portable" in done.stderr
        assert message in done.stderr
        return
    commands = compilers[1].read_text().splitlines()
    assert {x for command in commands for x in re.findall(r"-DVARIANT=(\w+)", command)} == {isa}
    glue = [x for x in commands if "recurrent.cpp" in x]
    assert glue and all(f"-DATTNFAST_BUILD_ISA={isa}" in x for x in glue)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_instruction_set_alone(isa, tmp_path):
    """A library for one instruction set refers to no kernels of another."""
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(cxx[0]) is None or shutil.which("nm") is None:
        pytest.skip("needs a C++ compiler and nm")
    flags = ["-std=c++20", "-O1", "-c", f"-DATTNFAST_BUILD_ISA={isa}"]
    flags += [
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-I{Path(torch.__file__).parent}/include",
    ]
    tables = {}
    for unit in ("attention", "linear"):
        out = tmp_path / f"{unit}.o"
        subprocess.run([*cxx, *flags, ROOT / f"csrc/cpu/{unit}.cpp", "-o", out], check=True)
        names = subprocess.run(["nm", "-C", "-u", out], capture_output=True, text=True).stdout
        tables[unit] = set(re.findall(r"attnfast::(\w+)::(?:attention|linear)\b", names))
    assert tables == {"attention": {isa}, "linear": {isa}}


@pytest.mark.parametrize("compiler", [True, False])
def test_a_wheel_is_named_by_what_it_holds(source, compilers, compiler):
    environment = compilers[0] if compiler else {"PATH": "/nonexistent", "CXX": ""}
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "-w", "out", "."],
        cwd=source,
        env={**os.environ, "ATTNFAST_BUILD_CUDA": "0", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = source.glob("out/*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert ("attnfast/_C_cpu.so" in names) == compiler
    assert "attnfast/kernels/attention.py" in names
    assert wheel.name.startswith("attnfast-0.2.0.dev0-")  # not within git
    assert wheel.name.endswith("-py3-none-any.whl") != compiler
    assert ("-cp310-abi3-linux" in wheel.name) == compiler
    assert ("attnfast/_C_cpu.txt" in names) != compiler
    assert ("_C_cpu: attention.o" in done.stdout + done.stderr) == compiler


@pytest.mark.parametrize("choice", ["", "1"])
def test_build_failure_is_one_sentence(source, choice):
    """The package installs without the library, unless that is insisted on."""
    (source / "csrc/cpu/attention.h").write_text("#error this header is broken\n")
    done = build(source, ATTNFAST_BUILD_CPU=choice)
    assert done.returncode == (1 if choice else 0)
    lines = (done.stderr if choice else done.stdout).splitlines()
    (line,) = [x for x in lines if x.startswith("attnfast: _C_cpu")]
    kept = source / "out/attnfast/_C_cpu.txt"
    assert kept.exists() != bool(choice)
    assert choice or kept.read_text().strip() in line
    assert "this header is broken" in line
    log = Path(re.search(r"its output is in (\S+?\.log)", line)[1])
    assert "this header is broken" in log.read_text()
    assert not list(source.glob("out/**/*.so"))


def test_build_against_an_old_torch(source):
    done = build(source, **fake_torch(source / "fake-torch", "2.9.1"))
    assert done.returncode != 0
    error = done.stderr.strip()
    assert "\n" not in error
    assert "attnfast needs torch >= 2.10 to build against, found 2.9.1" in error


def test_an_isolated_build_finds_torch(source, compilers):
    """It sees no package of the environment, as under pip, whose torch is found nevertheless."""
    isolated = source / "isolated"
    isolated.mkdir()
    for package in ("setuptools", "ninja"):
        folder = Path(importlib.import_module(package).__file__).parent
        (isolated / package).symlink_to(folder)
    (isolated / "sitecustomize.py").write_text(
        "import sys; sys.path[:] = [x for x in sys.path if 'site-packages' not in x]"
    )
    done = build(source, **compilers[0], PYTHONPATH=str(isolated))
    assert done.returncode == 0, done.stderr
    assert f"-I{Path(torch.__file__).parent}/include" in compilers[1].read_text(), done.stdout


BUILT = [(8, 0), (9, 0), (10, 0)]


@pytest.mark.parametrize(
    ("own", "built", "runs"),
    [
        *(((8, minor), BUILT, True) for minor in (0, 6, 9)),
        *((own, BUILT, True) for own in ((9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))),
        *((own, BUILT, False) for own in ((7, 0), (7, 5), (8, 7))),
        ((8, 0), [(8, 6), (9, 0)], False),
        ((8, 9), [(8, 6), (9, 0)], True),
        ((8, 9), [(8, 7), (9, 0)], False),
        ((8, 7), [(8, 7), (9, 0)], True),
        ((8, 9), [(9, 0)], False),
        ((9, 0), [(8, 0)], True),
    ],
)
def test_a_library_runs_on_the_gpus_it_was_built_for(own, built, runs, monkeypatch):
    """A GPU that it has nothing for is refused in a sentence, and Triton asked instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: own)
    monkeypatch.setattr(backends, "load_library", lambda _: None)
    monkeypatch.setattr(backends, "has_kernel", lambda *_: True)
    monkeypatch.setattr(backends, "architectures", lambda: built)
    reason = backends.Cuda().unsupported_reason(CARD)
    assert (reason is None) == runs
    if not runs:
        major, minor = own
        assert f"this GPU has {major}.{minor}" in reason
        assert f"TORCH_CUDA_ARCH_LIST={major}.{minor}" in reason
        assert len(reason) < 200 and "\n" not in reason


@pytest.mark.parametrize(("own", "runs"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_triton_needs_a_capability(own, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: own)
    monkeypatch.setattr(backends, "triton_interpreted", lambda: False)
    monkeypatch.setattr(backends, "_triton_missing", lambda: False)
    reason = backends.Triton().unsupported_reason(CARD)
    assert reason == (None if runs else "Triton needs compute capability 8.0, this GPU has 7.5")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, "cuda"),
        ({"score": "dot"}, "cuda"),
        ({"score": "dot", "dtype": torch.bfloat16}, "triton"),
        ({"score": "dot", "dtype": torch.bfloat16, "step": True}, "cuda"),
        ({"dtype": torch.bfloat16}, "cuda"),
        ({"operator": "coverage_attention"}, "cuda"),
        ({"operator": "copy_distribution"}, "triton"),
    ],
    ids=str,
)
def test_the_backend_goes_by_what_is_asked(asked, wanted, monkeypatch):
    """Products of half types go to Triton first, which has tensor cores for them."""
    monkeypatch.setattr(backends, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(backends, "triton_interpreted", lambda: False)
    monkeypatch.setattr(backends, "_select", backends._select.__wrapped__)
    asked = {"dtype": torch.float32, **asked}
    assert backends.select_backend(None, torch.device("cuda"), **asked) == wanted


def test_a_call_that_one_backend_cannot_run_goes_to_the_next(monkeypatch):
    """As more filters than Triton takes, where there is no other backend for a GPU."""
    monkeypatch.setattr(backends, "_has_warned", False)
    monkeypatch.setattr(backends, "triton_interpreted", lambda: False)
    monkeypatch.setattr(backends, "_triton_missing", lambda: False)
    monkeypatch.setattr(backends, "has_kernel", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backends.Cuda, "_unsupported_reason", lambda *_: "it was not built")
    most = backends.Triton.most_filters
    asked = (torch.device("cuda", 7), torch.float32, "coverage_attention", True)
    assert backends.select_backend(None, *asked, filters=most) == "triton"
    with pytest.warns(UserWarning, match=f"at most {most} filters, not {most + 1}"):
        assert backends.select_backend(None, *asked, filters=most + 1) == "reference"
    with pytest.raises(
        RuntimeError, match=f"'triton' cannot run this call: it takes at most {most}"
    ):
        backends.select_backend("triton", *asked, filters=most + 1)


def test_an_interpreter_goes_to_nobody_who_has_not_asked(monkeypatch):
    monkeypatch.setattr(backends, "triton_interpreted", lambda: True)
    asked = backends.DispatchKey(torch.device("cpu"), torch.float32)
    assert backends.ranked_backends(asked)[-1] == "reference"


@pytest.mark.parametrize("queries", [1, 2])
def test_one_query_is_a_step(queries, monkeypatch):
    asked = []
    select_backend = attnfast.functional.select_backend
    monkeypatch.setattr(
        attnfast.functional,
        "select_backend",
        lambda *a, **k: asked.append(k["step"]) or select_backend(*a, **k),
    )
    attnfast.dot_attention(*(torch.zeros(2, n, 4) for n in (queries, 3, 3)))
    assert asked == [queries == 1]


def test_info_tells_of_a_setting_with_which_calls_fail():
    done = python("from attnfast.translate.cli import main; main(['info'])", ATTNFAST_CPU_ISA="x")
    assert "cpu        off: ATTNFAST_CPU_ISA must be portable, avx2 or avx512" in done.stdout
    done = python("import attnfast", ATTNFAST_LOG="dispatch,x")
    assert "ATTNFAST_LOG must be 'dispatch', got 'dispatch,x'" in done.stderr


def test_sources_that_are_not_installed_say_so(source):
    """As where Python is started in the sources' folder, which then hides the package installed."""
    done = python(f"""if True:
        import sys
        sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f)]
        sys.path.insert(0, {str(source)!r})
        from attnfast.translate.cli import main
        main(["info"])
    """)
    said = f"cpu        off: attnfast was imported from its sources in {source}/attnfast, not as"
    assert said in done.stdout, done.stdout + done.stderr
