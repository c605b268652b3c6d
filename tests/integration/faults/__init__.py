"""Faults of the stream and the fleet, on real processes."""
