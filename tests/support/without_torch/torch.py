"""Hides torch from processes that have this folder on their path.

Importing torch costs a process two CPU seconds, which tests without tensors need not spend.
"""

raise ModuleNotFoundError("torch is hidden from this process", name="torch")
