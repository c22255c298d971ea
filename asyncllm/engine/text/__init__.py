"""Between text and token ids: templates and prompts in, detokenised text and stop strings out."""
