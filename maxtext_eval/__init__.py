"""Evaluation of the models of maxtext_models."""

__version__ = '0.1.0'
