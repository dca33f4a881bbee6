"""A rank's part in training: its reports, collectives, preemption notices and session."""
