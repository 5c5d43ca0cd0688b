"""The residual stream on a model's own graph: its writers and its readers.

``capture.py`` traces the model into a graph (``graph.py``), ``channels.py`` follows the channels of
a value through it, and ``operators.py`` recognises linear operators. ``survey.py`` collects
everything around the norms: their readers, and the streams that they are on.
"""
