"""Exact surgery, healing, quantisation and export for pretrained Hugging Face checkpoints."""

__version__ = "0.1.0"
