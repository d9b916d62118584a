"""Builds the compiled libraries; everything else is in pyproject.toml.

They are plain shared libraries on PyTorch's stable ABI, not Python modules: one wheel serves every
Python from 3.10 and every torch from 2.10. Without a compiler the package installs without them.
The CUDA library is for a torch built with CUDA. What is compiled is said line by line, which pip
shows with -v; `attnfast info` says what there is afterwards.

ATTNFAST_BUILD_CPU, ATTNFAST_BUILD_CUDA   0 leaves a library out, 1 insists on it
TORCH_CUDA_ARCH_LIST="8.0 9.0"            the architectures of the CUDA library, PTX for the last
ATTNFAST_BUILD_ISA=avx2                   the CPU library for one instruction set alone, which
                                          builds in a third of the time; nothing checks that the
                                          processor has it
ATTNFAST_CXXFLAGS="-g"                    more flags for the C++ compiler and its linker
CXX, CUDA_HOME, MAX_JOBS                  as usual
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
OLDEST_TORCH = (2, 10)
#: The oldest torch whose stable ABI is asked for, as the headers encode it.
TARGET = f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
X86 = platform.machine() in ("x86_64", "AMD64")
VARIANTS = {
    "portable": [],
    **({"avx2": ["-mavx2", "-mfma"]} if X86 else {}),
    **({"avx512": [f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")] + ["-mfma"]} if X86 else {}),
}


def torch_found() -> tuple[Path, str]:
    """Return where torch is installed and its version, or stop with one sentence."""
    wanted = f"attnfast needs torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to build against"
    try:
        import torch
    except ImportError:
        raise SystemExit(
            f"{wanted}, found none: install it first, then attnfast with --no-build-isolation"
        ) from None
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise SystemExit(f"{wanted}, found {torch.__version__}")
    return Path(torch.__file__).parent, torch.__version__


def compiler() -> list[str] | None:
    """Return the C++ compiler's command, $CXX and no other if that is set, or None."""
    chosen = os.environ.get("CXX")
    for command in [shlex.split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return None


def torch_has_cuda() -> bool:
    """Whether the torch to build against is one for NVIDIA GPUs."""
    torch_found()
    import torch

    return torch.version.cuda is not None


def say(text: str) -> None:
    """Print a line whole and at once: threads do, and a compiler may take minutes."""
    print(f"attnfast: {text}\n", end="", flush=True)


def nvcc() -> str | None:
    """Return nvcc's path, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


class BuildLibraries(build_ext):
    """Compiles the units of a library side by side, links them, says in one line what it built."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition(".")[2]
        build = {"_C_cpu": self.cpu_commands, "_C_cuda": self.cuda_commands}[name]
        wish = os.environ.get(f"ATTNFAST_BUILD_{name[3:].upper()}", "")
        out = Path(self.get_ext_fullpath(ext.name))
        missing = "left out by the environment" if wish == "0" else None
        if missing is None and compiler() is None:
            missing = "there is no C++ compiler (g++, clang++ or $CXX)"
        if missing is None and name == "_C_cuda" and nvcc() is None:
            missing = "there is no nvcc (on the path or in $CUDA_HOME/bin)"
        if missing is None and name == "_C_cuda" and wish != "1" and not torch_has_cuda():
            missing = "this torch is without CUDA (ATTNFAST_BUILD_CUDA=1 builds it nevertheless)"
        if missing:
            out.unlink(missing_ok=True)
            if wish == "1":
                raise SystemExit(f"attnfast: {name} cannot be built: {missing}")
            slower = ", slower" if name == "_C_cpu" else ""
            say(f"{name} not built: {missing}; the package works without it{slower}")
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        torch, version = torch_found()
        # Not in pip's own folder, which is gone afterwards: the next build takes what it can.
        temp = ROOT / "build" / name
        temp.mkdir(parents=True, exist_ok=True)
        units, link, summary = build(torch, temp)
        shared = [*ROOT.glob("csrc/*"), *ROOT.glob(f"csrc/{name[3:]}/*")]
        headers = [p for p in shared if p.suffix in (".h", ".cuh")]
        if not units:
            raise SystemExit(f"attnfast: {name} cannot be built: its sources in csrc/ are missing")

        def outdated(unit: tuple[Path, list[str]]) -> bool:
            """Whether an object is older than its sources, or of another command or torch."""
            out, command = unit
            own = [Path(x) for x in command if x.endswith((".cpp", ".cu"))]
            newest = max(p.stat().st_mtime for p in [*headers, *own])
            made_by = out.with_suffix(".command")
            same = made_by.exists() and made_by.read_text() == f"{version} {shlex.join(command)}"
            return not (same and out.exists() and out.stat().st_mtime > newest)

        todo = [unit for unit in units if outdated(unit)]

        def compile_unit(number: int) -> None:
            unit, command = todo[number]
            say(f"compiling {name}, {number + 1} of {len(todo)}: {unit.stem}")
            self.call(command, temp)
            unit.with_suffix(".command").write_text(f"{version} {shlex.join(command)}")

        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            list(pool.map(compile_unit, range(len(todo))))
        objects = [str(unit[0]) for unit in units]
        self.call([link[0], *objects, *link[1:], "-o", str(out)], temp)
        say(f"built {name} ({summary})")

    def copy_extensions_to_source(self) -> None:
        """Take away, too, what an earlier build has left there and this one leaves out."""
        for ext in self.extensions:
            if not Path(self.build_lib, self.get_ext_filename(ext.name)).exists():
                (ROOT / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def call(self, command: list[str], temp: Path) -> None:
        """Run a compiler; on failure keep its output in a file and stop with one sentence."""
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            log = (temp / "failed.log").resolve()
            log.write_text(f"{shlex.join(command)}\n{done.stdout}")
            first = next((x for x in done.stdout.splitlines() if "error" in x), "no message")
            raise SystemExit(
                f"attnfast: {command[0]} failed ({first.strip()}); all it said is in {log}; "
                f"ATTNFAST_BUILD_{temp.name[3:].upper()}=0 installs without {temp.name}"
            )

    def cpu_commands(self, torch: Path, temp: Path):
        cxx = [*compiler(), "-std=c++20", "-fPIC", "-fvisibility=hidden"]
        extra = shlex.split(os.environ.get("ATTNFAST_CXXFLAGS", ""))
        variants, only = VARIANTS, os.environ.get("ATTNFAST_BUILD_ISA")
        if only:
            if only not in VARIANTS:
                names = ", ".join(VARIANTS)
                raise SystemExit(f"ATTNFAST_BUILD_ISA must be one of {names}, got {only!r}")
            variants = {only: VARIANTS[only]}
            extra.append(f"-DATTNFAST_BUILD_ISA={only}")
        units = []
        for source in sorted(ROOT.glob("csrc/cpu/*.cpp")):
            if not source.stem.endswith("_kernel"):
                flags = ["-O2", TARGET, f"-I{torch}/include", *extra]
                out = temp / f"{source.stem}.o"
                units.append((out, [*cxx, *flags, "-c", str(source), "-o", str(out)]))
                continue
            for variant, isa in variants.items():
                flags = ["-O3", "-fno-exceptions", "-fno-rtti", f"-DVARIANT={variant}", *isa]
                out = temp / f"{source.stem}_{variant}.o"
                units.append((out, [*cxx, *flags, *extra, "-c", str(source), "-o", str(out)]))
        link = [*compiler(), "-shared", *extra, f"-L{torch}/lib", "-ltorch_cpu"]
        return units, link, f"{compiler()[0]}; {', '.join(variants)}"

    def cuda_commands(self, torch: Path, temp: Path):
        wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0 9.0 10.0"
        found = re.findall(r"(\d+)\.(\d)", wanted)
        if not found:
            raise SystemExit(f"attnfast: TORCH_CUDA_ARCH_LIST must be like 8.0 9.0, got {wanted!r}")
        archs = sorted({major + minor for major, minor in found}, key=int)
        code = [f"-gencode=arch=compute_{x},code=sm_{x}" for x in archs]
        # Later GPUs compile it when it is loaded: see attnfast/ops/backends.py.
        code.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        flags = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", TARGET]
        # Flushing denormal numbers makes a reciprocal one instruction.
        flags += ["-DUSE_CUDA", "-ftz=true", "--threads", "2"]
        units = []
        for source in sorted(ROOT.glob("csrc/cuda/*.cu")):
            out = temp / f"{source.stem}.o"
            command = [nvcc(), *flags, *code, f"-I{torch}/include", "-c", str(source)]
            units.append((out, [*command, "-o", str(out)]))
        # A CPU torch can build it too: an empty library stands in for the one that will be loaded.
        stub = temp / "libtorch_cuda.so"
        command = [*compiler(), "-shared", "-x", "c++", os.devnull, f"-Wl,-soname,{stub.name}"]
        units.append((stub, [*command, "-o", str(stub)]))
        link = [nvcc(), "-shared", "-cudart", "shared", *code, "-Xlinker", "--no-as-needed"]
        link += [f"-L{torch}/lib", "-ltorch_cpu", f"-L{temp}", f"-l:{stub.name}"]
        return units, link, "nvcc; " + ", ".join(x.rpartition("=")[2] for x in code)


class NameWheel(bdist_wheel):
    """Names a wheel without any library as what it is, one for every platform."""

    def run(self) -> None:
        self.run_command("build_ext")
        if not any(Path(x).exists() for x in self.get_finalized_command("build_ext").get_outputs()):
            self.distribution.ext_modules = None
            self.root_is_pure = True
        super().run()


libraries = ["_C_cpu"] + (["_C_cuda"] if list(ROOT.glob("csrc/cuda/*.cu")) else [])
setup(
    ext_modules=[Extension(f"attnfast.{name}", [], optional=True) for name in libraries],
    cmdclass={"bdist_wheel": NameWheel, "build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
