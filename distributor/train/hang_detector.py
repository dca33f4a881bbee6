"""Ray Train's variables for its detector of hangs, as settings of ours.

They follow Ray 2.60, whose detector asks NCCL. Ours watches the ranks, on CPUs too.
"""

from __future__ import annotations

import math
import os
from typing import Any

from distributor.screen.one_time_warnings import warn_once

ENABLED = "RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR"
SECONDS = "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S"
ACTION = "RAY_TRAIN_NCCL_RAS_ACTION"
POLL = "RAY_TRAIN_NCCL_RAS_MIN_POLL_INTERVAL_S"
DEFAULT_SECONDS = 600.0
SETTINGS = {"observe": "stall_warning", "fail": "stall_timeout"}
"""What each action does."""


def stall_settings() -> dict[str, Any]:
    """Return the settings that the variables ask for.

    Raises
    ------
    ValueError
        If a variable is invalid.
    """
    if os.environ.get(ENABLED, "").lower() not in ("1", "true"):
        return {}
    text = os.environ.get(SECONDS, str(DEFAULT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{SECONDS} must be a positive number of seconds, but is {text!r}.")
    if POLL in os.environ:
        warn_once(f"{POLL} has no effect: the ranks report by themselves that they are idle.")
    return {SETTINGS[_action()]: seconds}


def ends_runs() -> bool:
    """Return whether a run that hangs is to end with Ray Train's error."""
    return "stall_timeout" in stall_settings()


def _action() -> str:
    action = os.environ.get(ACTION, "observe").lower()
    if action not in SETTINGS:
        raise ValueError(f"{ACTION} must be one of {', '.join(SETTINGS)}, but is {action!r}.")
    return action
