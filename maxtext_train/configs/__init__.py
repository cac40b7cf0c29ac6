"""Packaged configs: `--config=NAME[:MODEL]` takes NAME.py from here."""
