"""Runs an incident once more: its slots, table rows and forwards, through a monitor on the CPU.

The first run has nothing but what was recorded. If the violation comes out of it, the recorded
events explain it (a forward wrote into a foreign slot), or it stood so when the window began. If it
does not, further runs put in, just before the step that saw it, what was found to differ: at the
slot itself, then around it. What had to be put in is what somebody changed from outside.
"""

from kvcanary_plugin.replay.attempts import replay
from kvcanary_plugin.replay.story import slot_history, story

__all__ = ["replay", "slot_history", "story"]
