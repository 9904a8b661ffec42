"""Reverse mode on scalar code: a shared graph, sums of products, derivatives of single operations."""
