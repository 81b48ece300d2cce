"""Architectures as plain values, and the tables of model families by which they are read from config.json.

Module `decoder_config` reads a `ModelArchitecture` by the table in `decoder_families`, `encoder` has architecture and
table of encoders, and `pooling` describes what a model of vectors has beside its transformer. A `GenericArchitecture`
describes a model that transformers implements. Module `checkpoint_tensors` assigns a checkpoint's tensors to parameters
by the names in these tables.
"""
