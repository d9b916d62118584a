"""Makes Triton's interpreter three times as fast where kernels call many functions.

Before each call of a function of Triton, it puts its own operators in the place of the language's,
and looks for them all in two modules. Where they are in place, this has nothing to do.
"""

from types import FunctionType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

put_operators = interpreter._patch_lang


def put_operators_once(function: FunctionType) -> Any:
    """Put the interpreter's operators in place where they are not."""
    modules = [x for x in (tl, tl.core) if any(x is y for y in function.__globals__.values())]
    if any(tl.core.is_builtin(x.load) for x in modules):
        return put_operators(function)
    return interpreter._LangPatchScope()


if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = put_operators_once
