"""Builds the compiled libraries; everything else is in pyproject.toml.

They are plain shared libraries on PyTorch's stable ABI, not Python modules: one wheel serves every
Python from 3.10 and every torch from 2.10. Without a compiler the package installs without them.

ATTNFAST_BUILD_CPU, ATTNFAST_BUILD_CUDA   0 leaves a library out, 1 insists on it
TORCH_CUDA_ARCH_LIST="8.0 9.0"            the architectures of the CUDA library
ATTNFAST_CXXFLAGS="-g"                    more flags for the C++ compiler and its linker
CXX, CUDA_HOME, MAX_JOBS                  as usual
"""

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
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


def torch_folder() -> Path:
    """Return where torch is installed, or stop with one sentence."""
    wanted = f"attnfast needs torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to build against"
    try:
        import torch
    except ImportError:
        raise SystemExit(
            f"{wanted}, found none: install it first, then attnfast with --no-build-isolation"
        ) from None
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise SystemExit(f"{wanted}, found {torch.__version__}")
    return Path(torch.__file__).parent


def compiler() -> list[str] | None:
    """Return the C++ compiler's command, $CXX and no other if that is set, or None."""
    chosen = os.environ.get("CXX")
    for command in [shlex.split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return None


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
        if missing:
            out.unlink(missing_ok=True)
            if wish == "1":
                raise SystemExit(f"attnfast: {name} cannot be built: {missing}")
            print(f"attnfast: {name} not built: {missing}; the package works without it, slower")
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(self.build_temp) / name
        temp.mkdir(parents=True, exist_ok=True)
        units, link, summary = build(torch_folder(), temp)
        newest = max(p.stat().st_mtime for p in [*ROOT.glob("csrc/**/*.*"), Path(__file__)])
        if not units:
            raise SystemExit(f"attnfast: {name} cannot be built: its sources in csrc/ are missing")

        def compile_unit(unit: tuple[Path, list[str]]) -> None:
            """Compile unless the object is newer than every source and of the same command."""
            out, command = unit
            made_by = out.with_suffix(".command")
            line = shlex.join(command)
            if out.exists() and out.stat().st_mtime > newest and made_by.read_text() == line:
                return
            self.call(command, temp)
            made_by.write_text(line)

        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            list(pool.map(compile_unit, units))
        objects = [str(unit[0]) for unit in units]
        self.call([link[0], *objects, *link[1:], "-o", str(out)], temp)
        print(f"attnfast: built {name} ({summary})")

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
        units = []
        for source in sorted(ROOT.glob("csrc/cpu/*.cpp")):
            if not source.stem.endswith("_kernel"):
                flags = ["-O2", TARGET, f"-I{torch}/include", *extra]
                out = temp / f"{source.stem}.o"
                units.append((out, [*cxx, *flags, "-c", str(source), "-o", str(out)]))
                continue
            for variant, isa in VARIANTS.items():
                flags = ["-O3", "-fno-exceptions", "-fno-rtti", f"-DVARIANT={variant}", *isa]
                out = temp / f"{source.stem}_{variant}.o"
                units.append((out, [*cxx, *flags, *extra, "-c", str(source), "-o", str(out)]))
        link = [*compiler(), "-shared", *extra, f"-L{torch}/lib", "-ltorch_cpu"]
        return units, link, f"{compiler()[0]}; {', '.join(VARIANTS)}"

    def cuda_commands(self, torch: Path, temp: Path):
        wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0 9.0 10.0"
        archs = [x.removesuffix("+PTX").replace(".", "") for x in wanted.replace(";", " ").split()]
        code = [f"-gencode=arch=compute_{x},code=sm_{x}" for x in archs]
        if wanted.endswith("+PTX"):
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
        return units, link, "nvcc; " + ", ".join(f"sm_{x}" for x in archs)


libraries = ["_C_cpu"] + (["_C_cuda"] if list(ROOT.glob("csrc/cuda/*.cu")) else [])
setup(
    ext_modules=[Extension(f"attnfast.{name}", [], optional=True) for name in libraries],
    cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
