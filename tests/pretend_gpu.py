"""A pytest plugin, ``-p pretend_gpu``: CPU tensors that say they are on a GPU.

Numbers come from the CPU's kernels, so they show nothing of a GPU's. What shows is what only a GPU
complains of: tensors of two devices in one operator, a NumPy array of a tensor that is not on the
CPU, and, while a graph is captured, waiting for the device or copying to or from it. A captured
graph replays its operators.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from attnfast.kernels import search
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from attnfast.models import encoders
from attnfast.ops import backends, cuda_graphs, search_steps
from attnfast.ops.search import SearchInputs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
#: Operators that take a CPU's tensor beside a GPU's; of the first, some may be masks.
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
MIXED = INDEXED | {"copy_"}
#: Operators that wait for the device.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "repeat_interleave",
}
captured: list | None = None  # by the graph that is being captured: operators, arguments, results
is_invalid = False  # whether that graph had to refuse an operator


def refuse_in_a_graph(what: object) -> None:
    global is_invalid
    if captured is not None:
        is_invalid = True
        raise RuntimeError(f"{what} while a graph is captured")


class OnGpu(Tensor):
    """A tensor that says it is on a GPU; the numbers are in ``cpu_tensor``."""

    cpu_tensor: Tensor
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, x: Tensor) -> OnGpu:
        out = Tensor._make_wrapper_subclass(
            cls, x.size(), x.stride(), x.storage_offset(), dtype=x.dtype, layout=x.layout
        )
        out.cpu_tensor = x
        return out

    def __reduce_ex__(self, protocol):
        return self.cpu_tensor.detach().__reduce_ex__(protocol)

    def __repr__(self):
        return f"OnGpu({self.cpu_tensor})"

    def data_ptr(self):
        return self.cpu_tensor.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        ours = namespace.startswith("attnfast")
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not isinstance(x, OnGpu):
                if (x.dim() > 0 or ours) and name not in MIXED:
                    raise RuntimeError(f"{func}: a tensor {list(x.shape)} is on the CPU")
                if x.dim() > 0 or name == "copy_":
                    refuse_in_a_graph(f"{func}: a tensor on the CPU")
        masks = name in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITING or masks:
            refuse_in_a_graph(func)
        run = func
        if name == "search":
            with Devices():  # modes are off below the dispatcher
                return tuple(search_steps.search(SearchInputs(*args)))
        if ours:
            run = getattr(getattr(torch.ops.attnfast_cpu, name), func._overloadname)
        kwargs = {**(kwargs or {}), **({"device": CPU} if "device" in (kwargs or {}) else {})}
        inner = tree_map_only(OnGpu, lambda x: x.cpu_tensor, (args, kwargs))
        real = inner
        if captured is not None and func._schema.is_mutable:  # a capture changes no tensor
            inner = tree_map_only(Tensor, Tensor.clone, inner)
        result = run(*inner[0], **inner[1])
        if captured is not None:
            captured.append((run, real, result))
        out = tree_map_only(Tensor, OnGpu, result)
        return out if ours else return_and_correct_aliasing(func, args, kwargs, out)


class Move(torch.autograd.Function):
    """Copies to the GPU, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        refuse_in_a_graph("a copy from device to device")
        return x.cpu_tensor.clone() if isinstance(x, OnGpu) else OnGpu(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Move.apply(grad)


class Devices(TorchFunctionMode):
    """Serves the functions that take a device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda") and isinstance(args[0], Tensor):
            return self.move(func, name, *args, **kwargs)
        if name in ("numpy", "__array__") and isinstance(args[0], OnGpu):
            raise TypeError("a GPU's tensor has no NumPy array: copy it to the CPU first")
        if name == "tolist" and isinstance(args[0], OnGpu):
            refuse_in_a_graph(name)
            return args[0].cpu_tensor.tolist()
        if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "cuda":
            return func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "new_tensor"):
            refuse_in_a_graph(name)
        assert kwargs.get("generator") is None, "a GPU's numbers want a GPU's generator"
        leaf = kwargs.pop("requires_grad", False)
        out = func(*args, **{**kwargs, "device": CPU})
        return (out if isinstance(out, OnGpu) else OnGpu(out)).requires_grad_(leaf)

    def move(self, func, name, x, *rest, **kwargs):
        target = {"cpu": CPU, "cuda": GPU}.get(name) or kwargs.pop("device", None)
        dtype = kwargs.pop("dtype", None)
        for other in rest:
            if isinstance(other, Tensor):
                target, dtype = other.device, other.dtype
            elif isinstance(other, str | torch.device):
                target = torch.device(other)
            elif isinstance(other, torch.dtype):
                dtype = other
        if target is not None and torch.device(target).type != x.device.type:
            x = Move.apply(x)
        kwargs.pop("non_blocking", None)
        return x if dtype is None and not kwargs else x.to(dtype=dtype or x.dtype, **kwargs)


class Stream:
    """Work is done at once."""

    cuda_stream, device = 0, GPU

    def __init__(self, *_: Any):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        refuse_in_a_graph("synchronize")


class Graph:
    """The operators of a capture, which run again on what is in their arguments then."""

    def __init__(self):
        self.operators = []

    def capture_begin(self, *_: Any, **__: Any):
        global captured
        captured = self.operators

    def capture_end(self):
        global captured, is_invalid
        was_invalid, captured, is_invalid = is_invalid, None, False
        if was_invalid:
            raise RuntimeError("the capture is invalid")

    def replay(self):
        for run, (args, kwargs), result in self.operators:
            again = run(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, **_: Any):
    graph.capture_begin()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


def launched(function: Callable) -> Callable:
    """Return a launcher of kernels that runs on the CPU's tensors, and is part of a capture."""

    def run(*args, **kwargs):
        real = tree_map_only(OnGpu, lambda x: x.cpu_tensor, (args, kwargs))
        inner = real if captured is None else tree_map_only(Tensor, Tensor.clone, real)
        result = function(*inner[0], **inner[1])
        if captured is not None:
            captured.append((function, real, result))
        return tree_map_only(Tensor, OnGpu, result)

    return run


def unpacked(x: Tensor, lengths: Tensor | None = None, **_: Any) -> Any:
    """Leave a sequence as it is: packed ones are made in C++, where all is on the CPU."""
    if lengths is None:
        return x, None
    assert lengths.device == CPU, "pack_padded_sequence wants lengths on the CPU"
    return x


def attention_skip_reason(backend, device, dtype=None, operator="attention", *_):
    """Return why a backend cannot run: a GPU's want a GPU, the CPU's a CPU."""
    wanted = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}.get(backend, device.type)
    if backend != "reference" and not hasattr(getattr(torch.ops, f"attnfast_{backend}"), operator):
        return f"it has no {operator} yet"
    return None if device.type == wanted else f"it wants tensors on {wanted}"


for name in ("find_candidates", "log_probs", "continue_beam", "trace"):
    setattr(search, name, launched(getattr(search, name)))
cuda_graphs.PLAIN_TENSORS.add(OnGpu)
backends.load_library("_C_cpu")
backends.triton_interpreted = lambda: False
backends.unsupported_reason = attention_skip_reason
for name, stand_in in {
    "is_available": lambda: True,
    "get_device_name": lambda *_: "a pretence",
    "is_current_stream_capturing": lambda: captured is not None,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "current_stream": lambda *_: Stream(),
    "Stream": Stream,
    "stream": lambda _: contextlib.nullcontext(),
    "device": lambda _: contextlib.nullcontext(),
    "current_blas_handle": lambda: 0,
    "get_allocator_backend": lambda: "native",
    "CUDAGraph": Graph,
    "graph": capture,
    "_lazy_init": lambda: None,
    "_sleep": lambda _: None,
    "manual_seed_all": lambda _: None,
    "set_rng_state": lambda *_: None,
    "synchronize": lambda *_: None,
}.items():
    setattr(torch.cuda, name, stand_in)
torch.cuda.graphs._graph_pool_handle = lambda: (0, 0)
encoders.pack_padded_sequence = encoders.pad_packed_sequence = unpacked
torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda _: None  # asks the driver
torch.backends.cudnn.is_acceptable = lambda _: False
torch.__future__.set_overwrite_module_params_on_conversion(True)  # .data has one device


def pytest_collection_modifyitems(config, items):
    """Leave out two thirds of the tables: device and capture depend on few of their properties."""
    tables = [x for x in items if x.name.startswith("test_table")]
    left_out = [x for i, x in enumerate(tables) if i % 3]
    config.hook.pytest_deselected(items=left_out)
    for item in left_out:
        items.remove(item)


def pytest_configure(config):
    Devices().__enter__()
