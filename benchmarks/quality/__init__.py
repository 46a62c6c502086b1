"""Quality: our own small vision-language models, and the scenes and questions they answer."""
