"""Benchmarks that others publish figures of, for a model and its conversion, side by side.

``python -m benchmarks.field NAME ORIGINAL CONVERTED`` runs one where its data are. Nothing is
downloaded except by the evaluators themselves. docs/benchmarks.md lists them.
"""
