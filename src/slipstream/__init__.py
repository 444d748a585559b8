"""slipstream: train DFlash drafters for the language model you serve."""

__version__ = "0.1.0"
