"""A rank's part in training: its reports, its process group, its data loaders.

Checkpoints and their files are in `distributor.train.storage`; what users import is in
`distributor.train`.
"""
