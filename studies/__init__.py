"""The study: norms, point-wise layers and the annealing between them, trained from scratch side by side.

``python -m studies.train`` is one run, ``python -m studies.sweep`` the whole plan, ``python -m
studies.report`` the page.
"""
