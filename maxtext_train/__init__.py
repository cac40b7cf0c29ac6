"""Pretraining: data, step, loop, checkpoints."""

__version__ = '0.1.0'
