"""Architectures as plain values, and the tables of model families by which they are read from config.json.

`architecture_config` reads a `ModelArchitecture` (decoders), `encoder_architecture` an `EncoderArchitecture`, and
`pooling_layout` what a model of vectors has beside its transformer. A `GenericArchitecture` describes a model that
transformers implements. Tables `model_families` and `encoder_families` hold what differs between families. Module
`checkpoint_tensors` assigns a checkpoint's tensors to parameters by the names in these tables.
"""
