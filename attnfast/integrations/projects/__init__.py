"""The adapters of other projects' attention: a file for each project, with a list ``ADAPTERS``."""
