"""Where ranks hang: requests for their stacks, and stalls of a whole run.

The nodes measure activity and collect stacks; this package decides when, and shows them.
"""
