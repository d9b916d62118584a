"""The operators: one file each, holding the formula, the checks, the oracle and the gradient."""
