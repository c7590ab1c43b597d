"""Measurements that anyone can repeat: one command each, one JSON object out."""
