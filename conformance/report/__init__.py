"""The HTML page of a run: one file, no network, no scripts."""
