"""Programs on their way to ranks, and what comes back of them: values and failures."""
