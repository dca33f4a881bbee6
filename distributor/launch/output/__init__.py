"""What the driver shows: messages, the ranks' output and the progress line."""
