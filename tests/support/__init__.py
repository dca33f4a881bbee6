"""A standalone Spark cluster on machines that are network namespaces, to be hurt on purpose."""
