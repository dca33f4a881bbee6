"""The report of a run: the event log, the account of its time, the verdict, and the page."""
