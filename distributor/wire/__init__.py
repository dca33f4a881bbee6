"""What crosses between the processes of a run."""
