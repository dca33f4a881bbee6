"""The summary of where ranks are."""

from __future__ import annotations

from distributor.node.worker.stacks import append_stacks

PACKAGES = "/env/lib/python3.12/site-packages"
BARRIER = f"""\
Thread (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
Current thread (most recent call first):
  File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 4818 in barrier
  File "{PACKAGES}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/user/train.py", line 41 in step
  File "/home/user/train.py", line 60 in train
  File "{PACKAGES}/distributor/node/worker/main.py", line 10 in run
"""
BACKWARD = f"""\
Thread (most recent call first):
  File "{PACKAGES}/torch/autograd/graph.py", line 824 in _engine_run_backward
  File "{PACKAGES}/torch/autograd/__init__.py", line 353 in backward
  File "{PACKAGES}/torch/_tensor.py", line 648 in backward
  File "<ipython-input-3>", line 7 in train
"""
LIBRARY_ONLY = f"""\
Thread (most recent call first):
  File "{PACKAGES}/distributor/node/worker/main.py", line 10 in run
  File "<string>", line 9 in <module>
"""
SENT = f"""\
Thread (most recent call first):
  File "{PACKAGES}/pyspark/work/app-1/0/distributor-modules-0123/data.py", line 5 in read
"""


def test_the_users_line_and_what_it_called_are_named() -> None:
    text = append_stacks(
        "Stalled.", {0: BARRIER, 1: BACKWARD, 2: BARRIER, 3: LIBRARY_ONLY, 4: SENT}
    )
    summary, _, stacks = text.partition("\n\nStacks of the ranks, the most recent call first:\n")
    assert summary.splitlines() == [
        "Stalled.",
        "",
        "Where the ranks are:",
        "  ranks 0, 2: in barrier, called by step (train.py:41)",
        "  rank 1: in backward, called by train (<ipython-input-3>:7)",
        "  rank 4: in read (data.py:5)",
    ]
    assert stacks.count("in step") == 1
    assert stacks.count("distributor/node/worker/main.py") == 1, "of rank 3, which has no others"
    assert "rank 3:\n" in stacks


def test_files_of_this_package_are_not_the_users() -> None:
    ours, users = "/srv/distributor/runtime.py", "/home/user/distributor/steps.py"
    for file, shown in ((ours, "train (train.py:3)"), (users, "step (steps.py:9)")):
        calls = f'  File "{file}", line 9 in step\n  File "/home/user/train.py", line 3 in train\n'
        stack = f"Thread (most recent call first):\n{calls}"
        assert shown in append_stacks("Stalled.", {0: stack}).splitlines()[3]
