"""Tasks that make their own prompts and judge the answers. Pure."""
