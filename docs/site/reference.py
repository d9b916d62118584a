"""Documents the public names of a module from their docstrings, and checks that none is missing.

The directive `public` of the pages in docs/api stands for the docstrings of the names in it:

    ```{public} attnfast.nn
    BahdanauAttention
    LuongAttention
    ```

A name of several modules has its docstring in one of them, and the others refer to it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import test_api
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

LOGGER = logging.getLogger(__name__)
MODULES = {
    name: importlib.import_module(name) for x in test_api.MODULES if (name := f"attnfast{x}")
}
#: What torch.nn.Module alone calls.
MACHINERY = {"extra_repr"}


def home(module: str, name: str) -> str:
    """Return the full name under which a public object is documented.

    It is that of ``attnfast``, or else of the module closest to the object's source.
    """
    x = getattr(MODULES[module], name)
    if not (inspect.isclass(x) or inspect.isroutine(x)):
        return f"{module}.{name}"
    listed = [
        y
        for y, found in MODULES.items()
        if getattr(found, name, None) is x and name in found.__all__
    ]
    return min(listed, key=lambda y: (y != "attnfast", not x.__module__.startswith(y))) + f".{name}"


def comments(cls: type) -> set[str]:
    """Return the attributes of a class that have a ``#:`` comment."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.startswith("attnfast")
        for owner, name in ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
        if owner == base.__qualname__
    }


def members(cls: type) -> dict[str, str | None]:
    """Return the public members that a class shares with no public base, with their directive.

    It is None for values without a ``#:`` comment of their own, and for undocumented methods.
    """
    ours = [base for base in cls.__mro__ if base.__module__.startswith("attnfast")]
    shared = [base for base in ours[1:] if not base.__name__.startswith("_")]
    names = {name for base in ours if base not in shared for name in vars(base)}

    def directive(name: str, x: Any) -> str | None:
        if not (inspect.isroutine(x) or isinstance(x, (property, classmethod, staticmethod))):
            return "autoattribute" if name in comments(cls) and name in vars(cls) else None
        if not any(getattr(vars(base).get(name), "__doc__", None) for base in ours):
            return None
        return "autoproperty" if isinstance(x, property) else "automethod"

    found = {
        name: inspect.getattr_static(cls, name)
        for name in sorted(names - MACHINERY)
        if not name.startswith("_")
    }
    return {
        name: directive(name, x)
        for name, x in found.items()
        if all(inspect.getattr_static(base, name, None) is not x for base in shared)
    }


def documented(module: str, name: str) -> list[str]:
    """Return the directive that documents a public name."""
    full, x = home(module, name), getattr(MODULES[module], name)
    kind = "class" if inspect.isclass(x) else "function"
    if full != f"{module}.{name}":
        role = "class" if kind == "class" else "func"
        return [f"``{module}.{name}`` is :{role}:`{full}`.", ""]
    lines = [f".. auto{kind}:: {full}"]
    if kind == "class":
        lines += ["   :show-inheritance:"] * (x.__bases__ != (object,)) + [""]
        shown = members(x).items()
        lines += [f"   .. {directive}:: {full}.{y}" for y, directive in shown if directive]
    return [*lines, ""]


class Public(SphinxDirective):
    """The docstrings of public names of a module."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all names."""
        module = self.arguments[0]
        lines = ["```{eval-rst}", f".. py:currentmodule:: {module}", ""]
        if not self.content:
            lines += [f".. automodule:: {module}"]
        for name in self.content:
            lines += documented(module, name)
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def show_public_bases(app: Sphinx, name: str, x: Any, options: Any, bases: list[type]) -> None:
    """Replace private bases by the first public class that they derive from."""
    bases[:] = [
        next(y for y in base.__mro__ if not y.__name__.startswith("_"))
        if base.__name__.startswith("_")
        else base
        for base in bases
    ]


def find_inherited(app: Sphinx, env: BuildEnvironment, node: Any, content: Any) -> Any:
    """Return a reference to a method of a class that a public base documents, or None."""
    module, python = node.get("py:module"), env.domains.python_domain
    owner = getattr(MODULES.get(module), node.get("py:class") or "", type)
    for base in owner.__mro__:
        target = f"{module}.{base.__name__}.{node['reftarget']}"
        if target in python.objects:
            return python.resolve_xref(
                env, node["refdoc"], app.builder, "meth", target, node, content
            )
    return None


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without documentation."""
    python = env.domains.python_domain
    known = python.objects
    for module, found in MODULES.items():
        if module not in python.modules:
            LOGGER.warning("no page documents the module %s", module)
        for name in found.__all__:
            x, full = getattr(found, name), home(module, name)
            if inspect.ismodule(x):
                continue
            if full not in known:
                LOGGER.warning("%s is on no page", full)
            if not (inspect.isclass(x) or inspect.isroutine(x)):
                continue
            if not x.__doc__:
                LOGGER.warning("%s has no docstring", full)
            if inspect.isclass(x):
                text = f"{inspect.getdoc(x)} {' '.join(comments(x))}"
                for member, directive in members(x).items():
                    if not directive and not re.search(rf"\b{member}\b", text):
                        LOGGER.warning("%s.%s has no docstring", full, member)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the check."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("missing-reference", find_inherited)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
