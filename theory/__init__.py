"""The statements of "When Do Curricula Work in Federated Learning?", checked numerically."""
