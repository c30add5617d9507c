"""The parts that several test files share."""
