"""The timeline: every span of a run, always on, in a ring buffer of bounded size.

`Timeline` records spans; `ResourceClock` accounts for all of one resource's time (invariant 11): at any
moment it is in exactly one state, so the states' shares add up to 1.
"""

from gymllm.timeline.timeline import ResourceClock as ResourceClock
from gymllm.timeline.timeline import Span as Span
from gymllm.timeline.timeline import Timeline as Timeline

__all__ = ["ResourceClock", "Span", "Timeline"]
