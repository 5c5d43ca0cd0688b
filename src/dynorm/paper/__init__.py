"""The papers' claims, to run and to check: simulation, fits, figures, a study and proofs.

Importing this package loads nothing heavy. matplotlib, scipy and sympy come with ``pip install
'dynorm[paper]'``.
"""
