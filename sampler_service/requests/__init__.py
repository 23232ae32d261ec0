"""Requests and replies of sampling: read, checked, written."""
