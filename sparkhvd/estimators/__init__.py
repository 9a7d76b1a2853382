"""Estimators and their models, the same for every framework; each framework is one folder behind ``plugin``.

Start with ``api.estimator`` (``fit``, on the driver), ``training.worker`` (one rank), ``models.model`` (``transform``).
"""
