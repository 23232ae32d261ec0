"""Extensions of vLLM that are used only on CPUs."""
