"""Modules of ``ray.train`` that have no counterpart here: importing one says what to use instead.

The folder is on the path of `distributor.train`, so that a program finds them under the names that
it has imported from Ray: ``distributor.train.xgboost``.
"""
