"""The compiled libraries list each operator's fields once, as the schemas of Python have them."""

import contextlib
import copy
import ctypes
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import attnfast
from attnfast.ops.backends import load_library
from attnfast.ops.linear import LINEAR
from attnfast.ops.operators import ARGUMENTS

FAMILIES = {
    "cpu": ("attention", "copying", "coverage", "recurrent", "search", "linear"),
    "cuda": ("attention", "copying", "coverage", "recurrent"),
}


#: The types of schemas in C++.
TYPES = {"Optional[Tensor]": "Optional", "int": "int64_t", "float": "double", "str": "std::string"}


def listed(backend: str, name: str) -> str:
    """Return an operator's fields as the libraries list them; all results are tensors."""
    schema = getattr(getattr(torch.ops, f"attnfast_{backend}"), name).default._schema
    types = [str(x.type) for x in schema.arguments]
    arguments = [f"{TYPES.get(t, t)} {x.name}, " for t, x in zip(types, schema.arguments)]
    assert {str(x.type) for x in schema.returns} == {"Tensor"}
    return f"{name}({''.join(arguments)}) -> {', '.join(x.name for x in schema.returns)},"


def test_a_misspelt_field_of_a_backward_raises():
    """Without an error it would be None in every call."""
    fields = [(x, torch.Tensor) for x in ("grad_output", "input", "weight", "baised")]
    for change in (
        {"Backward": NamedTuple("Backward", fields)},
        {"Gradients": NamedTuple("Gradients", [("grad_inputs", torch.Tensor)])},
    ):
        wrong = copy.copy(LINEAR)
        vars(wrong).update(change)
        with pytest.raises(
            TypeError, match=r"no input or output has the fields ..(baised|grad_inp)"
        ):
            wrong._plan({})


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_fields_are_those_of_the_schemas(backend):
    path = Path(attnfast.__file__).with_name(f"_C_{backend}.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # not built, or without the CUDA runtime that it is linked to
        pytest.skip(str(error))
    found = []
    for family in FAMILIES[backend]:
        operators = getattr(library, f"attnfast_{family}_operators")
        operators.restype = ctypes.c_char_p
        found += operators().decode().splitlines()
    names = [x for x in ARGUMENTS if hasattr(getattr(torch.ops, f"attnfast_{backend}"), x)]
    assert sorted(found) == sorted(listed(backend, name) for name in names)


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@pytest.mark.parametrize("refused", [False, True])
def test_no_call_keeps_memory(refused):
    """Not even that of a score's name, whether the call is taken or refused."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("no glibc")
    mallinfo.restype = Mallinfo
    if load_library("_C_cpu"):
        pytest.skip("no _C_cpu")
    x = torch.ones(1, 2, 4)
    wrong = x[0] if refused else x
    call = (x, wrong, x, None, None, None, None, None, 0, None, 1.0, "dot", False)

    def run(count):
        with torch.no_grad():
            for _ in range(count):
                with contextlib.suppress(RuntimeError):
                    torch.ops.attnfast_cpu.attention(*call)
        return mallinfo().uordblks

    run(100)
    before = run(10)
    assert run(2000) - before < 20_000  # a name kept by each would be 60,000 and more


@pytest.mark.cpu_library
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's memory counters")
def test_arguments_that_are_strings_are_freed():
    def pages(calls: int) -> int:
        for _ in range(calls):
            with pytest.raises(RuntimeError, match="score must be"):
                torch.ops.attnfast_cpu.key_exponentials(torch.zeros(1, 1, 1), None, "x" * 65536)
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = pages(100)
    assert pages(400) - before < 200 * 16  # a leak would be 16 pages of 4 KiB for each call
