"""Tests whether servers keep their promises under faults, wrong requests, attacks and long load."""
