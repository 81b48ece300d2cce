"""How the bundled models are made: text generator, tokenizer, training and evaluation."""
