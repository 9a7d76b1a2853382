"""Trained models: ``transform``, saving and loading, MLflow, and predictions without Spark."""
