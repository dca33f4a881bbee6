"""A rank's part in training: its reports, its process group, its share of the data."""
