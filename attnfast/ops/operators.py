"""The operators of the compiled backends, each defined by the fields of four named tuples.

The types of an :class:`Operator` are its arguments, its results, and the arguments and results of
its backward. Schemas, packing, unpacking and the derivative follow from their fields; positions
matter only to PyTorch's dispatcher.
"""

from __future__ import annotations

import importlib
import operator as getters
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import Function

from attnfast._utils.torch_private import below_autograd, is_transformed

LIBRARIES = {
    backend: torch.library.Library(f"attnfast_{backend}", "DEF")
    for backend in ("cpu", "triton", "cuda")
}
TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}


#: Calls an operator with arguments, such as by a CUDA graph, and returns its results.
Runner = Callable[[Any, Any], tuple[Any, ...]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_rows(x: Tensor, columns: int | None = None) -> Tensor:
    """Return an uninitialised tensor for rows like those of x, with x's order of heads in memory.

    A caller that passes a transposed query ``[B, T, H, A]`` can then transpose the context back
    without a copy.
    """
    *lead, _ = strides = x.stride()
    shape = (*x.shape[:-1], x.shape[-1] if columns is None else columns)
    if x.dim() < 4 or 0 in strides:
        return x.new_empty(shape)
    order = sorted(range(3), key=lambda axis: -lead[axis])
    out = x.new_empty([*(shape[axis] for axis in order), shape[-1]])
    return out.permute(*(order.index(axis) for axis in range(3)), 3)


def is_tracing() -> bool:
    """Return whether torch.compile, torch.export or torch.jit.trace is tracing a graph."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def needs_gradient(arguments: Any) -> bool:
    """Return whether a tensor among arguments requires a gradient."""
    return any([x.requires_grad for x in arguments if isinstance(x, Tensor)])


def may_need_gradient(arguments: Any) -> bool:
    """Return whether a gradient may be needed: under vmap and the like, tensors do not show it."""
    return is_transformed() or needs_gradient(arguments)


def invoke(overload: Any, arguments: Any, run: Runner | None = None) -> Any:
    """Call an operator; without gradients below autograd, and through ``run`` if given."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and may_need_gradient(arguments)):
        return results_of(overload(*arguments))
    with below_autograd():
        return results_of(overload(*arguments)) if run is None else run(overload, arguments)


def results_of(returned: Any) -> tuple[Any, ...]:
    """Return an operator's results as a tuple; the dispatcher returns a single result bare."""
    return (returned,) if isinstance(returned, Tensor) else returned


def schema(arguments: Any, results: Any) -> str:
    """Return the schema of an operator whose arguments and results are the fields of two types.

    The metadata of an ``Annotated`` field replaces its type's name.
    """

    def listed(fields: Any) -> str:
        hints = get_type_hints(fields, include_extras=True)
        return ", ".join(
            f"{t.__metadata__[0] if hasattr(t, '__metadata__') else TYPES[t]} {name}"
            for name, t in hints.items()
        )

    return f"({listed(arguments)}) -> ({listed(results)})"


def _getter(names: list[str], of: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that selects fields from a sequence whose fields have the names ``of``."""
    places = [of.index(name) for name in names]
    if len(places) < 2:
        return lambda values: tuple(values[i] for i in places)
    return getters.itemgetter(*places)


#: The type of every operator's arguments, and the function that raises unless they fit, as the
#: compiled code does.
ARGUMENTS: dict[str, Any] = {}
CHECKS: dict[str, Callable[..., None]] = {}

#: Make a named tuple of a type from values, in half the time of its own constructor.
unchecked = tuple.__new__


class ForwardOperator:
    """An operator whose results have no gradient, on every compiled backend.

    Args:
        name: in the namespaces ``attnfast_<backend>``.
        Call, Result: its arguments and its results, named tuples.
        check: raises before any computation unless the arguments fit.
        fake: returns empty results.
        backends: the backends that implement it.
        runners: for each backend, the function that calls its operator.
    """

    def __init__(
        self,
        name: str,
        Call: Any,
        Result: Any,
        *,
        check: Callable[[Any], None],
        fake: Callable[[Any], Any],
        backends: tuple[str, ...] = tuple(LIBRARIES),
        runners: dict[str, Runner] | None = None,
    ):
        self.libraries = {backend: LIBRARIES[backend] for backend in backends}
        self.name, self.Call, self.Result = name, Call, Result
        self.check, self.fake, self.runners = check, fake, runners or {}
        self.forwards = self.define(name, Call, Result, check, fake, self.libraries)

    @staticmethod
    def define(
        name: str, Arguments: Any, Results: Any, check: Any, fake: Any,
        libraries: dict[str, torch.library.Library] = LIBRARIES,
    ) -> dict[str, Any]:  # fmt: skip
        """Define an operator in the namespaces of backends; return it for each."""

        def fakes(*args):
            arguments = Arguments(*args)
            check(arguments)
            results = tuple(fake(arguments))
            return results if len(results) > 1 else results[0]

        CHECKS[name] = lambda *args: check(Arguments(*args))
        ARGUMENTS[name] = Arguments
        overloads = {}
        for backend, library in libraries.items():
            library.define(name + schema(Arguments, Results))
            torch.library.register_fake(f"attnfast_{backend}::{name}", fakes, lib=library)
            operators = getattr(torch.ops, f"attnfast_{backend}")
            overloads[backend] = getattr(operators, name).default
        return overloads

    def __call__(self, backend: str, arguments: Any) -> Any:
        """Run a backend; gradients use the derivative that is registered with PyTorch."""
        return unchecked(self.Result, self.forward(backend, arguments))

    def forward(self, backend: str, arguments: Any) -> tuple[Any, ...]:
        """Return the results of a backend as a plain tuple."""
        return invoke(self.forwards[backend], arguments, self.runners.get(backend))

    def differentiable(self, backend: str, arguments: Any) -> Any:
        """Return the result of the forward itself, which has no gradient."""
        return self(backend, arguments)


class Operator(ForwardOperator):
    """An operator and its backward.

    Args:
        name: in the namespaces ``attnfast_<backend>``; its backward is ``<name>_backward``.
        Call, Result, check, fake, backends, runners: those of a :class:`ForwardOperator`.
        Backward: the arguments of its backward. Each field is the gradient of a result
            (``grad_states``); an argument or a result, which is then saved (``input``,
            ``states``); ``need_grad_input`` and the like; or an optional argument that only steps
            over a memory pass, otherwise None.
        Gradients: the results of its backward. Each field is the gradient of an argument
            (``grad_input``), or ``grad_score``, of which the gradient of a bias is a sum.
        needs: for each ``need_grad_…`` the arguments whose gradients it stands for.
        constant: results that have no gradient.
        check_backward, fake_backward: ``check`` and ``fake`` of the backward.
    """

    def __init__(
        self,
        name: str,
        Call: Any,
        Result: Any,
        Backward: Any,
        Gradients: Any,
        *,
        needs: dict[str, tuple[str, ...]],
        check: Callable[[Any], None],
        check_backward: Callable[[Any], None],
        fake: Callable[[Any], Any],
        fake_backward: Callable[[Any], Any],
        constant: tuple[str, ...] = (),
        backends: tuple[str, ...] = tuple(LIBRARIES),
        runners: dict[str, Runner] | None = None,
    ):
        super().__init__(
            name, Call, Result, check=check, fake=fake, backends=backends, runners=runners
        )
        self.Backward, self.Gradients, self.constant = Backward, Gradients, constant
        self._plan(needs)
        self.backwards = self.define(
            f"{name}_backward", Backward, Gradients, check_backward, fake_backward, self.libraries
        )
        for backend, library in self.libraries.items():
            full = f"attnfast_{backend}::{name}"
            torch.library.register_autograd(
                full, self._derivative(backend), setup_context=self.setup_context, lib=library
            )
            torch.library.register_autograd(
                f"{full}_backward", self._no_second_derivative, lib=library
            )
        self.eager = self._eager()

    def differentiable(self, backend: str, arguments: Any) -> Any:
        """Return an autograd function that runs the operator in eager mode at half the overhead."""
        return unchecked(self.Result, self.eager.apply(*arguments, backend))

    def backward(self, backend: str, arguments: Any) -> Any:
        """Run the backward on a backend."""
        found = invoke(self.backwards[backend], arguments, self.runners.get(backend))
        return unchecked(self.Gradients, found)

    # ---- the derivative --------------------------------------------------------------------------

    def _plan(self, needs: dict[str, tuple[str, ...]]) -> None:
        """Compute the indices that map fields of one type to fields of another."""
        given, found = list(self.Call._fields), list(self.Result._fields)
        hints = {**get_type_hints(self.Call), **get_type_hints(self.Result)}
        saved = [x for x in self.Backward._fields if x in hints]
        tensors = [x for x in saved if hints[x] in (Tensor, Tensor | None)]
        numbers = [x for x in saved if x not in tensors]
        self._saved, self._tensors = len(tensors), _getter(tensors, given + found)
        self._numbers = _getter(numbers, given + found)
        self._needs = [[given.index(x) for x in names] for names in needs.values()]
        grads = [f"grad_{x}" for x in found]
        pool = [*grads, *tensors, *numbers, *needs]
        wanted = [x if x in pool else "none" for x in self.Backward._fields]
        known = {*pool, *(f"grad_{x}" for x in given), "grad_score"}  # a step's, else None
        unknown = {*self.Backward._fields, *self.Gradients._fields} - known
        if unknown:  # such a field would be None in every call
            raise TypeError(f"{self.name}: no input or output has the fields {sorted(unknown)}")
        self._arranged = _getter(wanted, [*pool, "none"])
        gradients = list(self.Gradients._fields)
        of_score = "bias" in given and "grad_score" in gradients
        names = ["grad_score" if of_score and x == "bias" else f"grad_{x}" for x in given]
        self._gradient_of = [gradients.index(x) if x in gradients else None for x in names]
        self._bias = given.index("bias") if of_score else None
        self._constant = [found.index(x) for x in self.constant]

    def setup_context(self, ctx: Any, inputs: Any, output: Any, *more: Tensor | None) -> None:
        """Save the arguments and results that the backward needs, and the tensors ``more``."""
        output = results_of(output)
        everything = (*inputs, *output)
        ctx.save_for_backward(*self._tensors(everything), *more)
        ctx.numbers = self._numbers(everything)
        bias = None if self._bias is None else inputs[self._bias]
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        if self._constant:
            ctx.mark_non_differentiable(*[output[i] for i in self._constant])
        ctx.set_materialize_grads(False)

    def arguments(self, ctx: Any, grads: Any, needs: Any = None) -> tuple[Any, Any]:
        """Return the arguments of the backward and the saved tensors, which can be read once.

        ``needs`` are the fields ``need_…``; by default they follow ``ctx.needs_input_grad``.
        """
        if needs is None:
            needed = ctx.needs_input_grad
            needs = [any([needed[i] for i in group]) for group in self._needs]
        saved = ctx.saved_tensors
        pool = (*grads, *saved[: self._saved], *ctx.numbers, *needs, None)
        arguments = unchecked(self.Backward, self._arranged(pool))
        if grads[0] is None:  # autograd passes None for a gradient of 0
            arguments = self._with_zeros(arguments)
        return arguments, saved

    def _with_zeros(self, arguments: Any) -> Any:
        """Return the arguments of a backward with gradient 0 for the first result."""
        fields = [x for x in self.Call._fields if x in self.Backward._fields]
        call = self.Call(**{x: getattr(arguments, x) for x in fields})
        name = f"grad_{self.Result._fields[0]}"
        return arguments._replace(**{name: self.fake(call)[0].zero_()})

    def of_inputs(self, ctx: Any, gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient of every argument that needs one, None for the others."""
        result: list[Any] = [
            gradients[i] if needed and i is not None else None
            for i, needed in zip(self._gradient_of, ctx.needs_input_grad)
        ]
        if self._bias is not None and result[self._bias] is not None:
            result[self._bias] = self.of_bias(ctx, result[self._bias])
        return tuple(result)

    @staticmethod
    def of_bias(ctx: Any, grad_score: Tensor) -> Tensor:
        """Return the gradient of a bias that has been broadcast, rounded once."""
        shape, dtype = ctx.bias
        return grad_score.sum_to_size(shape).to(dtype)

    def _derivative(self, backend: str) -> Callable[..., Any]:
        def backward(ctx: Any, *grads):
            return self.of_inputs(ctx, self.backward(backend, self.arguments(ctx, grads)[0]))

        return backward

    def _no_second_derivative(self, ctx: Any, *_):
        raise RuntimeError(
            f"{self.name} has no second derivative on the compiled backends: use "
            "backend='reference', or report.undo() in a replaced model"
        )

    def _eager(self) -> type[Function]:
        """Return the derivative for eager mode."""
        own = self

        class Eager(Function):
            @staticmethod
            def forward(ctx: Any, *inputs):
                *arguments, ctx.backend = inputs
                output = own.forward(ctx.backend, arguments)
                own.setup_context(ctx, arguments, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads):
                gradients = own.backward(ctx.backend, own.arguments(ctx, grads)[0])
                return *own.of_inputs(ctx, gradients), None

        return Eager


def implement(backend: str, module: str, functions: dict[str, str]) -> None:
    """Register functions of a module, imported at the first call, as a backend's operators."""
    for name, function in functions.items():

        def run(*args, name=name, function=function):
            CHECKS[name](*args)
            results = getattr(importlib.import_module(module), function)(ARGUMENTS[name](*args))
            return tuple(results) if len(results) > 1 else results[0]

        torch.library.impl(f"attnfast_{backend}::{name}", "default", run, lib=LIBRARIES[backend])
