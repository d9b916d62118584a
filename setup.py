"""Builds the compiled libraries by ninja; everything else is in pyproject.toml.

They are plain shared libraries on PyTorch's stable ABI, not Python modules: one wheel serves every
Python from 3.10 and every torch from 2.10. Building needs torch's headers, of the torch that is
installed where attnfast will be, also in a build that pip isolates. Without a C++ compiler, or if
it fails, the package installs without the library: the file attnfast/_C_<name>.txt has the reason,
which `attnfast info` prints. `pip install -v` shows the progress. ATTNFAST_BUILD_CPU and the other
environment variables are listed in docs/environment.md.
"""

import os
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).parent
OLDEST_TORCH = (2, 10)
#: The oldest torch whose stable ABI is used, as the headers encode it.
TARGET = f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
SYSTEM, MACHINE = re.match(r"(\w+)-(?:.*-)?(\w+)$", sysconfig.get_platform()).groups()
VARIANTS = {"portable": []}
if MACHINE in ("x86_64", "amd64"):
    VARIANTS["avx2"] = ["-mavx2", "-mfma"]
    VARIANTS["avx512"] = [f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")] + ["-mfma"]


class Torch(NamedTuple):
    """The torch to build against."""

    folder: Path
    cuda: str | None


def find_torch() -> Torch:
    """Return the installed torch; stop with one sentence if there is none, or too old a one.

    A build that pip isolates has its own import path, but the same interpreter.
    """
    environments = (
        [{}, {"base": os.environ["VIRTUAL_ENV"]}] if "VIRTUAL_ENV" in os.environ else [{}]
    )
    installed = [
        sysconfig.get_path(x, vars=y) for y in environments for x in ("platlib", "purelib")
    ]
    found = "none"
    for folder in [*sys.path, *installed, site.getusersitepackages()]:
        file = Path(folder) / "torch" / "version.py"
        if file.exists():
            about = runpy.run_path(str(file))
            found = about["__version__"]
            if tuple(int(x) for x in found.split(".")[:2]) >= OLDEST_TORCH:
                return Torch(file.parent, about["cuda"])
            break
    needed = ".".join(map(str, OLDEST_TORCH))
    raise SystemExit(
        f"attnfast needs torch >= {needed} to build against, found {found}: install torch first; "
        "if it is elsewhere than attnfast will be, pass --no-build-isolation"
    )


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command, $CXX and no other if that is set, or None."""
    chosen = os.environ.get("CXX")
    for command in [shlex.split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return None


def find_nvcc() -> str | None:
    """Return nvcc's path, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def output_files(library: Path) -> tuple[Path, Path]:
    """Return the files of which a build leaves one: a library, or why there is none."""
    return library, library.with_suffix(".txt")


class Unit(NamedTuple):
    """A source, the object that it becomes, and the command without these."""

    object: str
    source: Path
    command: list[str]


class Library(NamedTuple):
    """A library to compile and link.

    Attributes:
        units: its objects.
        link: the linker's command without the objects.
        needs: a library that torch will have loaded. An empty one of that name is linked in its
            place: the installed torch may be for another processor, or without CUDA.
        summary: a few words for the user.
    """

    units: list[Unit]
    link: list[str]
    needs: str
    summary: str


def describe_cpu_library(torch: Torch) -> Library:
    """Return the library of CPU kernels, its kernels once for each instruction set."""
    cxx = [*find_compiler(), "-std=c++20", "-fPIC", "-fvisibility=hidden"]
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
            flags = ["-O2", TARGET, f"-I{torch.folder}/include", *extra]
            units.append(Unit(f"{source.stem}.o", source, [*cxx, *flags]))
            continue
        for variant, isa in variants.items():
            flags = ["-O3", "-fno-exceptions", "-fno-rtti", f"-DVARIANT={variant}", *isa, *extra]
            units.append(Unit(f"{source.stem}_{variant}.o", source, [*cxx, *flags]))
    macos = SYSTEM == "macosx"  # a library need not name those in which it looks symbols up
    flags = ["-undefined", "dynamic_lookup"] if macos else ["-Wl,--no-as-needed"]
    link = [*find_compiler(), "-shared", *extra, *flags]
    summary = f"{find_compiler()[0]}; {', '.join(variants)}"
    return Library(units, link, "" if macos else "libtorch_cpu.so", summary)


def describe_cuda_library(torch: Torch) -> Library:
    """Return the library of CUDA kernels."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0 9.0 10.0"
    found = re.findall(r"(\d+)\.(\d)", given)
    if not found:
        raise SystemExit(f"attnfast: TORCH_CUDA_ARCH_LIST must be like 8.0 9.0, got {given!r}")
    archs = sorted({major + minor for major, minor in found}, key=int)
    code = [f"-gencode=arch=compute_{x},code=sm_{x}" for x in archs]
    # Later GPUs compile it when it is loaded: see attnfast/ops/backends.py.
    code.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    # Flushing denormal numbers makes a reciprocal one instruction.
    flags = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", TARGET, "-DUSE_CUDA"]
    flags += ["-ftz=true", "--threads", "2", *code, f"-I{torch.folder}/include"]
    sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
    units = [Unit(f"{source.stem}.o", source, [find_nvcc(), *flags]) for source in sources]
    link = [
        find_nvcc(),
        "-shared",
        "-cudart",
        "shared",
        *code,
        f"-L{torch.folder}/lib",
        "-ltorch_cpu",
    ]
    link += ["-Xlinker", "--no-as-needed"]
    summary = "nvcc; " + ", ".join(x.rpartition("=")[2] for x in code)
    return Library(units, link, "libtorch_cuda.so", summary)


def reason_against(name: str, choice: str) -> str | None:
    """Return why a library is not built, or None."""
    if choice == "0":
        return f"ATTNFAST_BUILD_{name[3:].upper()} is 0"
    if find_compiler() is None:
        chosen = os.environ.get("CXX")
        return (
            f"there is no $CXX, {chosen}" if chosen else "there is no C++ compiler (g++, clang++)"
        )
    if name == "_C_cuda" and find_nvcc() is None:
        return "there is no nvcc (on the path or in $CUDA_HOME/bin)"
    if name == "_C_cuda" and choice != "1" and find_torch().cuda is None:
        return "this torch is without CUDA (ATTNFAST_BUILD_CUDA=1 builds it nevertheless)"
    return None


def write_ninja(library: Library, folder: Path, name: str) -> None:
    """Write the file by which ninja builds a library."""
    from ninja.ninja_syntax import Writer, escape, escape_path

    with (folder / "build.ninja").open("w") as file:
        writer = Writer(file, width=100)
        options = {"depfile": "$out.d", "deps": "gcc", "description": f"{name}: $out"}
        writer.rule("compile", "$compile -MMD -MF $out.d -c $in -o $out", **options)
        writer.rule("link", "$link -o $out", description=f"{name}: linking $out")
        for unit in library.units:
            command = escape(shlex.join(unit.command))
            source = escape_path(str(unit.source))
            writer.build(unit.object, "compile", source, variables={"compile": command})
        objects, link, stubs = [x.object for x in library.units], library.link, []
        if library.needs:
            stubs = [library.needs]
            stub = [
                *find_compiler(),
                "-shared",
                "-x",
                "c++",
                os.devnull,
                f"-Wl,-soname,{library.needs}",
            ]
            writer.build(stubs, "link", variables={"link": escape(shlex.join(stub))})
            link = [*link, "-L.", f"-l:{library.needs}"]
        command = escape(shlex.join([link[0], *objects, *link[1:]]))
        writer.build(f"{name}.so", "link", objects, stubs, variables={"link": command})


def run_ninja(folder: Path) -> str | None:
    """Build what is outdated in a folder; return why it failed, or None."""
    try:
        import ninja
    except ImportError:
        raise SystemExit("attnfast needs ninja to build: pip install ninja") from None

    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    command = [os.path.join(ninja.BIN_DIR, "ninja"), "-C", str(folder), "-j", jobs]
    log = folder / "build.log"
    with (
        log.open("w") as kept,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        for line in process.stdout:
            kept.write(line)
            print(line, end="", flush=True)
    if process.returncode == 0:
        return None
    first = next((x for x in log.read_text().splitlines() if "error" in x), "no message")
    return f"the compiler failed ({first.strip()}); its output is in {log.resolve()}"


class BuildLibraries(build_ext):
    """Builds the libraries, or says why not."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition(".")[2]
        choice = os.environ.get(f"ATTNFAST_BUILD_{name[3:].upper()}", "")
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        reason = reason_against(name, choice)
        if reason is None:
            library = {"_C_cpu": describe_cpu_library, "_C_cuda": describe_cuda_library}[name](
                find_torch()
            )
            if not library.units:
                raise SystemExit(
                    f"attnfast: {name} cannot be built: its sources in csrc/ are missing"
                )
            # Not in pip's own folder, which is gone afterwards: the next build uses what is there.
            folder = ROOT / "build" / name / sysconfig.get_platform()
            folder.mkdir(parents=True, exist_ok=True)
            write_ninja(library, folder, name)
            reason = run_ninja(folder)
        for path in output_files(out):
            path.unlink(missing_ok=True)
        if reason is None:
            shutil.copy2(folder / out.name, out)
            print(f"attnfast: built {name} ({library.summary})", flush=True)
        elif choice == "1":
            raise SystemExit(f"attnfast: {name} cannot be built: {reason}")
        else:
            out.with_suffix(".txt").write_text(f"{reason}\n")
            slower = ", slower" if name == "_C_cpu" else ""
            print(f"attnfast: {name} not built: {reason}; the package works without it{slower}")

    def copy_extensions_to_source(self) -> None:
        """Copy the libraries and reasons; delete those of an earlier build."""
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            for built, copied in zip(
                output_files(Path(self.build_lib, name)), output_files(ROOT / name)
            ):
                copied.unlink(missing_ok=True)
                if built.exists():
                    shutil.copy2(built, copied)


class CheckTorch(dist_info):
    """Fails without torch before pip downloads the requirements, torch among them."""

    def run(self) -> None:
        if reason_against("_C_cpu", os.environ.get("ATTNFAST_BUILD_CPU", "")) is None:
            find_torch()
        super().run()


class PlatformWheel(bdist_wheel):
    """Tags a wheel without libraries as one for every platform."""

    def run(self) -> None:
        self.run_command("build_ext")
        if not any(Path(x).exists() for x in self.get_finalized_command("build_ext").get_outputs()):
            self.distribution.ext_modules = None
            self.root_is_pure = True
        super().run()


libraries = ["_C_cpu"] + (["_C_cuda"] if list(ROOT.glob("csrc/cuda/*.cu")) else [])
setup(
    ext_modules=[Extension(f"attnfast.{name}", [], optional=True) for name in libraries],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildLibraries, "dist_info": CheckTorch},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
