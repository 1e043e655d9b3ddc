"""Traces a real run: records on each rank, gathers one file in Chrome's trace format, and reads it again."""
