"""The papers' claims, to run and to check: the simulation of section 4, its fits, figures, and how far they hold.

Importing this package loads nothing heavy. matplotlib, scipy and sympy come with ``pip install
'dynorm[paper]'``.
"""
