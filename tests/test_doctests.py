"""The examples of docstrings run."""

import doctest
import importlib
import inspect

import pytest
import torch
from test_api import MODULES

import attnfast


def examples():
    """Yield the docstrings with examples of all public names, once each."""
    finder, seen = doctest.DocTestFinder(recurse=True), set()
    for name in MODULES:
        module = importlib.import_module(f"attnfast{name}")
        for public in module.__all__:
            thing = getattr(module, public)
            if inspect.ismodule(thing) or not callable(thing) or thing in seen:
                continue
            seen.add(thing)
            for found in finder.find(thing, public, globs={}):
                if found.examples:
                    yield pytest.param(found, id=f"{name.lstrip('.')} {found.name}".strip())


@pytest.mark.parametrize("example", [*examples()])
def test_it_prints_what_it_says(example):
    torch.manual_seed(0)
    example.globs.update(torch=torch, attnfast=attnfast)
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)
