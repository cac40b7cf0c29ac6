"""One file a family: card class, cards of its sizes, Hugging Face table."""
