"""Tries the recipes of docker/ on this machine without a container engine."""
