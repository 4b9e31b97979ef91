"""Sweeps, the paper's studies, and reports."""
