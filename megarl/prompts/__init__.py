"""Stage a: the prompt source, its tokenizer and the resumable cursor."""
