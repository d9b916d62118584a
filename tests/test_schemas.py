"""The compiled libraries list each operator's fields once, as the schemas of Python have them."""

import ctypes
from pathlib import Path

import pytest
import torch

import attnfast
from attnfast.ops.operators import ARGUMENTS


def listed(backend: str, name: str) -> str:
    """Return an operator's fields as the libraries list them."""
    schema = getattr(getattr(torch.ops, f"attnfast_{backend}"), name).default._schema
    arguments = "".join(f"{x.type} {x.name}, " for x in schema.arguments)
    return f"{name}({arguments}) -> " + "".join(f"{x.type} {x.name}, " for x in schema.returns)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_fields_are_those_of_the_schemas(backend):
    path = Path(attnfast.__file__).with_name(f"_C_{backend}.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # not built, or without the CUDA runtime that it is linked to
        pytest.skip(str(error))
    found = []
    for family in ("attention", "copying", "coverage"):
        operators = getattr(library, f"attnfast_{family}_operators")
        operators.restype = ctypes.c_char_p
        found += operators().decode().splitlines()
    assert sorted(found) == sorted(listed(backend, name) for name in ARGUMENTS)
