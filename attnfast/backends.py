"""Which implementation serves a call: one table, one reason per refusal."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from attnfast._torch import constant_in_graphs, has_kernel
from attnfast.errors import describe, refuse

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
#: The oldest NVIDIA GPU that Triton supports; for some older ones it compiles, and spills.
OLDEST_FOR_TRITON = (8, 0)
#: NVIDIA's systems on a chip: they run no machine code but their own.
ALONE = {(7, 2), (8, 7), (10, 1)}


@functools.cache
def not_installed() -> str | None:
    """Why neither compiled libraries nor Triton kernels can be found, or None.

    The sources' folder comes before the installed package where Python was started in it.
    """
    if importlib.util.find_spec("attnfast.kernels") is not None:
        return None
    return (
        f"attnfast was imported from its sources in {Path(__file__).parent}, not as installed: "
        "start Python in another folder, or install with pip install -e"
    )


@functools.cache
def load_library(name: str) -> str | None:
    """Load the compiled library ``attnfast/<name>.so`` once; return why it cannot be, or None."""
    path = Path(__file__).with_name(f"{name}.so")
    if not path.exists():
        if reason := not_installed():
            return reason
        needed = "a C++ compiler" if name == "_C_cpu" else "nvcc"
        return f"{path.name} was not built: install attnfast again with {needed} present"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        return f"{path.name} does not load into torch {torch.__version__}: {reason}"
    return None


def _cpu(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPU tensors, not on {device.type}"
    return load_library("_C_cpu")


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _triton_missing() -> bool:
    return importlib.util.find_spec("triton") is None


def _triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if _triton_missing():
        return "the package triton is not installed"
    if reason := not_installed():
        return reason
    if triton_interpreted():
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 asks for CPU tensors"
    if device.type != "cuda":
        return f"it runs on CUDA tensors, not on {device.type}"
    if torch.version.hip is None:
        own = torch.cuda.get_device_capability(device)
        if own < OLDEST_FOR_TRITON:
            needed = _named(OLDEST_FOR_TRITON)
            return f"Triton needs compute capability {needed}, this GPU has {_named(own)}"
    return None


def _named(*capabilities: tuple[int, int]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def architectures() -> list[tuple[int, int]]:
    """Return the compute capabilities that ``_C_cuda.so`` was built for, ascending.

    It has machine code for each, and PTX for the last.
    """
    library = ctypes.CDLL(str(Path(__file__).with_name("_C_cuda.so")))
    library.attnfast_cuda_architectures.restype = ctypes.c_char_p
    values = library.attnfast_cuda_architectures().decode().split(",")
    return [divmod(int(value) // 10, 10) for value in values]


def not_built_for(own: tuple[int, int], built: list[tuple[int, int]]) -> str | None:
    """Return why a library of these :func:`architectures` runs on no such GPU, or None.

    Machine code runs on later minor versions of its major one, PTX on everything later.
    """
    alike = [x for x in built if x[0] == own[0] and not {x, own} & ALONE]
    if own in built or own >= built[-1] or any(own >= x for x in alike):
        return None
    return (
        f"_C_cuda.so was built for compute capabilities {_named(*built)} and later than the last, "
        f"this GPU has {_named(own)}: build it with TORCH_CUDA_ARCH_LIST={_named(own)}"
    )


def _cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device.type != "cuda":
        return f"it runs on CUDA tensors, not on {device.type}"
    if reason := load_library("_C_cuda"):
        return reason
    return not_built_for(torch.cuda.get_device_capability(device), architectures())


def _reference(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


#: Every backend with the function that says why it cannot run a call, in order of preference: see
#: :func:`in_order`.
BACKENDS: dict[str, Callable[[torch.device, torch.dtype], str | None]] = {
    "triton": _triton,
    "cuda": _cuda,
    "cpu": _cpu,
    "reference": _reference,
}


@functools.cache
def why_not(
    backend: str, device: torch.device, dtype: torch.dtype, operator: str = "attention"
) -> str | None:
    """Return why ``backend`` cannot run tensors of this device and dtype, or None if it can."""
    reason = BACKENDS[backend](device, dtype)
    if reason is not None or backend == "reference":
        return reason
    name, key = f"attnfast_{backend}::{operator}", device.type.upper()
    registered = any(has_kernel(name, k) for k in (key, "CompositeExplicitAutograd"))
    return None if registered else f"it has no {operator} yet"


def in_order(operator: str, step: bool) -> list[str]:
    """Return the backends to try, the best first, for an operator and one query (``step``) or more.

    Latency is all that a decoder's step costs, and a scan over its rows: there CUDA C++ comes
    before Triton. Until both have been measured on a GPU this is an expectation.
    """
    order = [name for name in BACKENDS if name != "triton" or not triton_interpreted()]
    if step or operator == "coverage_attention":
        order.sort(key=lambda name: name != "cuda")  # the rest stay as they are
    return order


@functools.cache
def _choose(
    backend: str | None, device: torch.device, dtype: torch.dtype, operator: str, step: bool
) -> str:
    if backend is None:
        order = in_order(operator, step)
        reasons = {name: why_not(name, device, dtype, operator) for name in order}
        chosen = next(name for name in order if reasons[name] is None)
        if chosen == "reference":
            refusals = "; ".join(f"{name}: {reasons[name]}" for name in order[:-1])
            warnings.warn(
                f"attnfast runs on its reference implementation, right but slow ({refusals})",
                stacklevel=5,
            )
        return chosen
    if backend not in BACKENDS:
        refuse("backend", f"None or one of {', '.join(BACKENDS)}", describe(backend))
    reason = why_not(backend, device, dtype, operator)
    if reason is not None:
        raise RuntimeError(f"backend {backend!r} cannot run this call: {reason}")
    return backend


@constant_in_graphs
def choose(
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype,
    operator: str = "attention",
    step: bool = False,
) -> str:
    """Return the backend for a call; one asked for by name is that one or a ``RuntimeError``."""
    if backend is not None and not isinstance(backend, str):
        refuse("backend", f"None or one of {', '.join(BACKENDS)}", describe(backend))
    return _choose(backend if backend is None else str(backend), device, dtype, operator, step)
