"""OpenAI's and Ollama's API over HTTP, before a Hearth daemon."""
