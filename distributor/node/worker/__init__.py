"""Inside a rank: what it runs, and how it reports to its agent."""
