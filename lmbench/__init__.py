"""lmbench: measure training loops of Transformer language models, built on Lightning."""

__version__ = "0.1.0"
