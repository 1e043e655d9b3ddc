"""Traces single modules as static graphs, searches them and extracts parts, independently of Megatron."""
