"""Ours: sharp bounds, laws on the order of a bias, and random problems."""
