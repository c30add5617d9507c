"""The requests of the page, by topic."""
