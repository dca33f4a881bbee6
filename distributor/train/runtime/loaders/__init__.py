"""Data loaders that `prepare_data_loader` returns: on a rank's device, and resumable."""
