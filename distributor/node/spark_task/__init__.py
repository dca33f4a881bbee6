"""One node inside a Spark barrier task, its connection to the driver, and its states.

`task.run` is what Spark calls. What starts and watches the ranks is in `node.agent`.
"""
