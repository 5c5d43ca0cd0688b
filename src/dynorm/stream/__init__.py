"""The residual stream on a model's own graph: what writes into it, and what reads it.

``capture.py`` traces the model, ``graph.py`` follows the channels of a value, and ``operators.py``
recognises the linear operators.
"""
