"""What runs on each machine of a run: an agent, its ranks, and the environment they run in.

The driver's part of a run is in `distributor.launch`; what crosses between both is in `wire`.
"""
