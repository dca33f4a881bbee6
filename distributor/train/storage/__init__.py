"""What a training run stores: checkpoints, their manifests, and the log of its reports.

How the ranks agree on a report, and the public classes, are elsewhere in `distributor.train`.
"""
