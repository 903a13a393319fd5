"""What is plain Python and shared by every backend: configurations, names and shapes, checks, files, data."""

__version__ = "0.1.0"
