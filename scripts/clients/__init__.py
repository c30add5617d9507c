"""Runs programs of other authors, as they ship them, against our server."""
