"""Models by name or Hugging Face directory: cards, families, checkpoints, tokenizers and generation."""

__version__ = '0.1.0'
