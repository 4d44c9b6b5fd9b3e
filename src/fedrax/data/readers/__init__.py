"""Readers of data files: arrays, tables, images, texts, LEAF and Hugging Face data sets."""
