"""Data, model, method and Flower app of a federated study."""
