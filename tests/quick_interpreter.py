"""Makes Triton's interpreter three times as fast where kernels call many functions.

Before each call of a jitted function the interpreter patches two modules of the language, all of
whose members it examines. This skips the patch where it is in place.
"""

from types import FunctionType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

put_operators = interpreter._patch_lang


def put_operators_once(function: FunctionType) -> Any:
    """Patch the modules that a function uses, if they are not patched."""
    modules = [x for x in (tl, tl.core) if any(x is y for y in function.__globals__.values())]
    if any(tl.core.is_builtin(x.load) for x in modules):
        return put_operators(function)
    return interpreter._LangPatchScope()


if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = put_operators_once
