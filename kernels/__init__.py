"""Triton kernels, installed as ``attnfast.kernels``: one file per operator."""

if __name__ != "attnfast.kernels":  # attnfast's source folder is on the path
    import importlib.util
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    _root = Path(__file__).resolve().parent.parent
    _elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _root]
    _spec = PathFinder.find_spec(__name__, _elsewhere)
    if _spec is not None and _spec.loader is not None:  # Hugging Face's, say
        _module = sys.modules[__name__] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_module)
    else:  # an empty module, without the file or the version by which others detect a package
        del __file__
        __path__ = []

        def __getattr__(name: str) -> object:
            """Raise ImportError for a name that is imported from the package."""
            if name.startswith("__"):
                raise AttributeError(name)
            raise ImportError(
                f"no {name} in kernels: these are attnfast's Triton kernels, importable as "
                "attnfast.kernels only; for another package of this name install it, or leave "
                "attnfast's source folder"
            )
