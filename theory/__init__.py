"""Checks of Section 5 and supplement 2 of "When Do Curricula Work in Federated Learning?"."""
