"""MLflow on the driver: one run for a job, and what is recorded in it."""
