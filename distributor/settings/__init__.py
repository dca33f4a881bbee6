"""Types, fields and defaults of settings, and the interface of listeners."""
