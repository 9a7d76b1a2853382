"""Estimators and their models, shared by all frameworks; each framework is one folder behind ``plugin``.

Start with ``api.estimator`` (``fit``, on the driver), ``training.worker`` (one rank), ``models.model`` (``transform``).
"""
