"""Servers that a program starts, and that end with it."""
