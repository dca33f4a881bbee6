"""The tasks of one ordinary job of Spark as the nodes of a run, without a barrier stage."""
