"""What both services need. Imports neither torch nor vLLM nor Megatron."""
