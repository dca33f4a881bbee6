"""Scripts for peers that take a script and no function."""
