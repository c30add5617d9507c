"""Servers under faults, wrong requests, attacks and long load, and whether they keep what they promise."""
