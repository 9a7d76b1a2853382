"""The parameters of estimators and models: declarations, converters, and the classes that are their values."""
