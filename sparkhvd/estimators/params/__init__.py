"""The parameters of estimators and models: declarations, converters, and the classes of their values."""
