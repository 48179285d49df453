"""Batch jobs: a file of requests, a line each, becomes a file of results, whatever interrupts it."""
