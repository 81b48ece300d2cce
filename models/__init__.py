"""Scripts that make the bundled models: text generator, tokenizer, training and evaluation.

The package `corpus` generates the training text from the topic files in `data`, and `generate` prints the text. The
tokenizer is trained on this text by `tokenizer`, and `batches` packs the text into batches. The script `train` trains a
`network` on the batches and exports it in Hugging Face layout. The script `evaluate` checks an exported model with the
questions of `data/probes.json`.
"""
