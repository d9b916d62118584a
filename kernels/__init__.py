"""Triton kernels, installed as ``attnfast.kernels``: one file per operator."""

if __name__ != "attnfast.kernels":
    raise ImportError(
        "these are attnfast's Triton kernels, importable as attnfast.kernels only; "
        "for another package of this name leave attnfast's source folder"
    )
