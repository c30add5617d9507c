"""Programs of other authors, run as they ship them, against our server."""
