"""Admission of requests, and fair queueing over tenants."""
