"""Layers of decoder language models: specs that say what a layer is and NNX modules that say how it computes."""

__version__ = '0.1.0'
