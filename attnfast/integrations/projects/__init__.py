"""The adapters of other projects' attention: a file for each project, with a list ``ADAPTERS``.

``DISTRIBUTIONS`` names the project's packages on PyPI, where `make hosts` looks for its classes.
"""
