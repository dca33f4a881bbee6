"""Libraries of Hugging Face, under the names of ``ray.train.huggingface``."""
