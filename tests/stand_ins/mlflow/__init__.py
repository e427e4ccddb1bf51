"""Stands in for the library mlflow in tests."""
