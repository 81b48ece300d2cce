"""Between text and tokens: tokenizer, chat template, detokenizer, and the choices of an answer."""
