"""Everything below, assembled without any cloud client."""

__version__ = '0.1.0'
