"""Federated learning that is private, fair and personal."""
