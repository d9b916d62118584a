"""Find every class that attnfast serves in the newest releases of the projects that have it.

    python tests/integrations/releases.py [folder for the wheels]

Downloads the wheels, and reads their sources without importing them: a project may need another
Python. Prints a table, and ends with 1 if a class is in none of the places that its adapter names,
or if the table of docs/replace.md has another version. Classes without a place are copied from
books and repositories, and are left out.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from attnfast.integrations import registry
from attnfast.integrations.adapter import Adapter

PAGE = Path(__file__).parents[2] / "docs" / "replace.md"
PYTHON = "3.13"  # the newest that all of them support


def download(distribution: str, folder: Path) -> Path:
    """Return the newest wheel of a distribution."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = ["pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        only = ["--only-binary=:all:", "--python-version", PYTHON, "--dest", own, distribution]
        subprocess.run([sys.executable, "-m", *command, *only], check=True)
        (wheel,) = Path(own).glob("*.whl")
        return wheel.replace(folder / wheel.name)


def places(wheel: Path, name: str) -> Iterator[str]:
    """Yield the full names of a wheel's classes called ``name``."""
    with zipfile.ZipFile(wheel) as files:
        for path in files.namelist():
            if not path.endswith(".py"):
                continue
            source = files.read(path)
            if not re.search(rb"^class %b\b" % name.encode(), source, re.MULTILINE):
                continue
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            names = {x.name for x in ast.parse(source).body if isinstance(x, ast.ClassDef)}
            yield from [f"{module}.{name}"] if name in names else []


def place_of(adapter: Adapter, wheel: Path) -> str | None:
    """Return the place where a wheel has an adapter's class, if the adapter names it."""
    found = {x for name in adapter.classes for x in places(wheel, name.rpartition(".")[2])}
    return next((name for name in adapter.classes if name in found), None)


def main(folder: Path) -> int:
    """Print the table; return the status."""
    rows = "\n".join(re.findall(r"(?m)^\|.*", PAGE.read_text()))
    status = 0
    for project in registry.PROJECTS:
        distributions = getattr(project, "DISTRIBUTIONS", ())
        wheels = [download(x, folder) for x in distributions]
        for distribution, wheel in zip(distributions, wheels):
            version = wheel.name.split("-")[1]
            known = re.search(rf"{re.escape(distribution)} (\d[\w.]*)", rows)
            if known is None or known[1] != version:
                status = 1
                print(f"{distribution} {version}: docs/replace.md has {known and known[1]}")
        for adapter in project.ADAPTERS if distributions else ():
            found = [(wheel, place_of(adapter, wheel)) for wheel in wheels]
            found = [(wheel, place) for wheel, place in found if place]
            if not found and any("." in name for name in adapter.classes):
                found, status = [(wheels[0], "in none of the places that its adapter names")], 1
            for wheel, place in found:
                print(f"| {' '.join(wheel.name.split('-')[:2])} | {adapter.name} | {place} |")
    return status


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch)))
