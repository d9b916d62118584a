"""The examples of docstrings run, and every public class and function has one."""

import doctest
import importlib
import inspect
from collections.abc import Iterator

import pytest
import torch
from test_api import MODULES

import attnfast

#: Public classes and functions without an example, with the reason.
WITHOUT_EXAMPLE: dict[str, str] = {}
#: The packages that the examples of a module need.
NEEDS = {".analysis.plots": "matplotlib"}


def public() -> Iterator[tuple[str, str, object]]:
    """Yield module, name and object of all public classes and functions, once each."""
    seen = set()
    for module in MODULES:
        found = importlib.import_module(f"attnfast{module}")
        for name in found.__all__:
            x = getattr(found, name)
            if (inspect.isclass(x) or inspect.isroutine(x)) and x not in seen:
                seen.add(x)
                yield module, name, x


def examples():
    """Yield the docstrings with examples of all public names and of their methods."""
    finder = doctest.DocTestFinder(recurse=True)
    for module, name, x in public():
        for found in finder.find(x, name, globs={}):
            if found.examples:
                label = f"{module.lstrip('.')} {found.name}".strip()
                yield pytest.param(found, NEEDS.get(module), id=label)


@pytest.mark.parametrize(("example", "package"), [*examples()])
def test_it_prints_what_it_says(example, package):
    if package is not None:
        pytest.importorskip(package)
    torch.manual_seed(0)
    example.globs.update(torch=torch, attnfast=attnfast)
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)


def test_every_public_name_has_an_example():
    parser = doctest.DocTestParser()
    without = {
        f"attnfast{module}.{name}"
        for module, name, x in public()
        if not parser.get_examples(x.__doc__ or "")
    }
    assert without == WITHOUT_EXAMPLE.keys()
