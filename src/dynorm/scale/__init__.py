"""The scale channel: one channel of the residual stream in which the network keeps each token's size.

``add.py`` has the verb, and ``edit.py`` frees the channel by a rotation of the stream. The record of a
channel is ``replace/channel.py``, and the rows of the writers that keep it up to date are fitted in
``fit/rows.py``.
"""

from dynorm.scale.add import FreedStream, ScaleChannelReport, add_scale_channel_

__all__ = ["FreedStream", "ScaleChannelReport", "add_scale_channel_"]
