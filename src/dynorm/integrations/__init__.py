"""What stands on other libraries: pretrained models, tokenizers and the Trainer of transformers."""
