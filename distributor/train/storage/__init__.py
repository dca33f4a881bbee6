"""What training keeps: checkpoints, their files and the log of reports."""
