"""The public names and the arguments that they take, against tests/api.txt.

After a change that is meant, `python tests/test_api.py` writes the file again; its diff is what a
user of the package has to know.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("api.txt")
ROOT = Path(__file__).parents[1]
#: The modules that docs/api.md says are public.
MODULES = re.findall(r"(?m)^\| `attnfast([\w.]*)` \|", (ROOT / "docs/api.md").read_text())


def signature(name: str, x: object) -> str:
    """Return a name with its arguments and their defaults, if it is called; types are mypy's."""
    empty = inspect.Parameter.empty
    try:
        found = inspect.signature(x)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    own = [p.replace(annotation=empty) for p in found.parameters.values()]
    plain = found.replace(parameters=own, return_annotation=inspect.Signature.empty)
    return re.sub(" at 0x[0-9a-f]+", "", f"{name}{plain}")


def public(module: str) -> Iterator[str]:
    """Yield a line for each public name of a module, and for each method of its classes."""
    found = importlib.import_module(module)
    for name in sorted(found.__all__):
        x = getattr(found, name)
        if inspect.ismodule(x) or not callable(x):
            yield f"{module}.{name}"
            continue
        yield signature(f"{module}.{name}", x)
        if not inspect.isclass(x):
            continue
        private = [base for base in reversed(x.__mro__) if base.__name__.startswith("_")]
        members = {k: v for owner in (*private, x) for k, v in vars(owner).items()}
        for method, own in sorted(members.items()):
            if not method.startswith("_"):
                own = own.__func__ if isinstance(own, (classmethod, staticmethod)) else own
                yield "    " + (signature(method, own) if callable(own) else method)


def current() -> list[str]:
    return [line for module in MODULES for line in public(f"attnfast{module}")]


def test_the_public_names_are_those_of_the_snapshot():
    changed = difflib.unified_diff(
        SNAPSHOT.read_text().splitlines(), current(), "api.txt", "now", lineterm="", n=0
    )
    assert not (lines := list(changed)), "\n".join([*lines, "if meant: python tests/test_api.py"])


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(current()) + "\n")
