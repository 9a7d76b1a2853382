"""The imports of most test modules, which a warm process of the tests does once.

A rank that unpickles a function of a test module imports that module, and all modules that it imports.
"""

# ruff: noqa: F401

from __future__ import annotations

import numpy
import pandas
import psutil
import pyspark.ml.evaluation
import pyspark.ml.feature
import pyspark.ml.functions
import pyspark.ml.tuning
import pyspark.sql.functions
import pytest
import torch
import torchmetrics

import sparkhvd.driver.run
import sparkhvd.estimators.api.estimator
import sparkhvd.estimators.models.model
