"""The operators: one file each, with their arguments, results, checks, shapes and derivatives."""
