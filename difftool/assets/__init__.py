"""Package data: the checkpoint `tiny` and the held-out text that it was never trained on."""
