"""Convert a checkpoint to another architecture that starts as exactly the same function."""
