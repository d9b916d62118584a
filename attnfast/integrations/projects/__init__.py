"""The adapters of other projects' attention: a file for each project, with a list ``ADAPTERS``.

``DISTRIBUTIONS`` names what the project releases on PyPI: `make hosts` looks there for its classes.
"""
