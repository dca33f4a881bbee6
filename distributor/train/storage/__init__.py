"""What a training run stores: checkpoints, their manifests, and the log of its reports."""
