"""What the driver shows: console, status line and messages."""
