"""When to stop, to fail and to try again: functions of events and time, without I/O."""
