"""What a rank knows of itself: its context, its device, and what it sends to its agent."""
