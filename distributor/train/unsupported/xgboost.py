"""Refuses ``ray.train.xgboost``, by name."""

raise NotImplementedError(
    "distributor.train.xgboost: only PyTorch is supported. XGBoost trains on Spark DataFrames "
    "by itself: xgboost.spark.SparkXGBClassifier, SparkXGBRegressor and SparkXGBRanker."
)
