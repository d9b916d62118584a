"""Analyse attention: measures of its weights, tests of its faithfulness, and plots."""
