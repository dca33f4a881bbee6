"""Refuses ``ray.train.lightgbm``, by name."""

raise NotImplementedError(
    "distributor.train.lightgbm: only PyTorch is supported. LightGBM trains on Spark "
    "DataFrames by SynapseML: synapse.ml.lightgbm.LightGBMClassifier and LightGBMRegressor."
)
