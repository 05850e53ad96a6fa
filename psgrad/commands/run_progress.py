"""The progress of a run."""

from psgrad.run.progress import LOADING as LOADING
from psgrad.run.progress import Clock as Clock
from psgrad.run.progress import PassProgress as PassProgress
from psgrad.run.progress import read_ahead as read_ahead
from psgrad.run.progress import without_interrupts as without_interrupts
