"""Measurement: accuracy, outliers and speed of checkpoints side by side, and a report of them."""
